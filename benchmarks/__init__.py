"""Measurements of the framework itself: `python -m benchmarks`. They are no tests; docs/performance.md tells how."""
