"""Engine on vLLM, in a child process of the generator.

- `engine`: the engine. `settings`: vLLM's environment, its arguments, and the prompts that warm it up.
- `worker`: the code inside vLLM's process that takes weights from a file.
- `plugin`: ends that process with its generator.
- `stats`: the engine's gauges. `routes`: the experts that it chooses for each token.
"""
