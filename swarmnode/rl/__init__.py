"""The learning maths: advantages, objectives, corrections, the batch split. No model loading and no
I/O."""
