"""Judgement of rollouts in the trainer process."""
