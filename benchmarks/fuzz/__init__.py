"""Fuzzing of everything that reads bytes or messages of others."""
