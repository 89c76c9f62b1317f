"""Fuzzing of all code that reads bytes or messages from other processes."""
