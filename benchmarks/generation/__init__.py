"""Tokens per second through actor and generator, over a bare vLLM engine."""
