"""Engine on a vLLM server run by others.

- `engine`: the engine, and the server's routes. `answers`: answers of the server, chunk by chunk.
- `logprobs_probe`: whether the server reports log-probabilities at the sampling temperature.
"""
