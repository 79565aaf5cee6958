"""Parts that several benchmarks use."""
