"""A stand-in for verifiers 0.4.0 with only the signatures that swarmnode uses. `check.py` compares
them with the real ones."""

__version__ = "0.4.0"
