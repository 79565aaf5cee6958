"""Averaging of weights in the trainer process."""
