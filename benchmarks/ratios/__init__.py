"""Costs of codec, batching and objective relative to minimal implementations: a check that none rises."""
