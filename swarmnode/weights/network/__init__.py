"""Swaps of weights in the network process."""
