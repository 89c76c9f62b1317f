"""Trained tokens per second, over a bare PyTorch loop."""
