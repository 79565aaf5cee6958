"""Parts of benchmarks that are not commands."""
