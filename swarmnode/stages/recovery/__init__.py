"""A lost stage from what is left. Torch.

Not here: true copies of a stage (replicas, shadows, the base), which come first; and the healing and the gate that have to follow.
"""
