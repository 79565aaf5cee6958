"""Programs that measure the claims of README.md, docs/ and RESULTS.md: `python -m benchmarks.NAME`.
results/ has the raw results, `lib` the parts that several programs use."""
