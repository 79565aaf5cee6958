"""One command per claim: `python -m benchmarks.NAME [--quick] [--json PATH]` prints a table.
RESULTS.md and results/ have the results. `lib` has parts that several commands use."""
