"""Trained tokens per second of the learner, compared with a bare PyTorch loop."""
