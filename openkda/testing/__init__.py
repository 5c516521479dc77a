"""For tests and benchmarks only: input makers, the shared case list, and error measures."""
