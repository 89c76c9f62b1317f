"""Tokens per second through actor and generator, compared with a bare vLLM engine."""
