"""Trains a model again from the steps that a journal recorded.

- `recorded`: a recorded step. `retrain`: trains recorded steps.
"""
