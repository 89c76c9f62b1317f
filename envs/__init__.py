"""Environments: suites of tasks and their scoring. They know neither the model nor the wire format."""
