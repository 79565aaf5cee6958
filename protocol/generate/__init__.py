"""Generators of protocol/registry.toml, schema/ and vectors/: `python -m protocol.generate`."""
