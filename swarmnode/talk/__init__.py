"""Conversations with a policy: `swarmnode chat` and `swarmnode serve`."""
