"""Tasks: environments know neither the model nor the wire."""
