"""One file per claim: `python -m benchmarks.NAME [--quick] [--json PATH]` prints a table and writes
the same as JSON. See RESULTS.md."""
