"""swarmnode: strangers post-train a language model together by reinforcement learning."""

__version__ = "0.1.0"
