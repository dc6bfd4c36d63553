"""What all benchmarks share: servers to compare, load generators, what processes use, statistics, the report."""
