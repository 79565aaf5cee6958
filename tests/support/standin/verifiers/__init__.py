"""A stand-in for verifiers 0.4.0 with the signatures that swarmnode uses, and nothing else;
`check.py` compares them with the real ones."""

__version__ = "0.4.0"
