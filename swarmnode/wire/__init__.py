"""Bytes to messages and back. Pure: no trio, no torch, no libp2p, and nothing that knows what a
rollout is good for."""
