"""Toy tasks for benchmarks, with a known cost or a known optimum."""
