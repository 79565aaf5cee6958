"""The model being trained: loading, placement, LoRA, generation, log-probabilities. No loss and no
optimizer."""
