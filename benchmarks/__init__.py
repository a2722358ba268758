"""One table, one file: `python -m benchmarks.NAME` from the repository's root."""
