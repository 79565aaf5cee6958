"""What writes protocol/vectors and protocol/schema from this implementation: `python -m
protocol.generate.vectors`."""
