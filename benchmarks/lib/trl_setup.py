"""TRL's GRPOTrainer with the product's settings."""

from __future__ import annotations

from typing import Any

import trl

from swarmnode.config import TrainingConfig
from swarmnode.rl.objectives import MAX_GRAD_NORM, WEIGHT_DECAY


def grpo_config(
    folder: str, training: TrainingConfig, *, steps: int, seed: int, **settings: Any
) -> trl.GRPOConfig:
    """Return the configuration of a trainer that takes `steps` steps with one micro-batch each,
    constant learning rate, no dropout, no logs and no checkpoints.

    Args:
        folder: Output directory.
        settings: Further fields of GRPOConfig.
    """
    defaults: dict[str, Any] = {"use_cpu": True, "bf16": False}
    return trl.GRPOConfig(
        output_dir=folder,
        gradient_checkpointing=False,
        disable_dropout=True,
        seed=seed,
        per_device_train_batch_size=training.groups_per_step * training.num_generations,
        gradient_accumulation_steps=1,
        num_generations=training.num_generations,
        max_steps=steps,
        max_completion_length=training.max_completion_length,
        temperature=training.temperature,
        top_p=training.top_p,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        loss_type=training.loss_type,
        scale_rewards="group",
        beta=0.0,
        num_iterations=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        **(defaults | settings),
    )
