"""A stand-in for verifiers 0.4.0 with only the signatures that swarmnode uses."""

__version__ = "0.4.0"
