"""Toy tasks whose cost or optimum is known, for benchmarks."""
