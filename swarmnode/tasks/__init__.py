"""Seed to prompt and reward: the built-in tasks, the reasoning-gym adapter, the sandboxed scorer.
No torch, no network."""
