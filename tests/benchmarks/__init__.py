"""Scripts under benchmarks/."""
