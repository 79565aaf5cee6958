"""Generators of protocol/vectors and protocol/schema: `python -m protocol.generate.vectors`."""
