"""Engine on vLLM, in a child process of the generator.

- `engine`: the engine. `settings`: vLLM's environment, its arguments, and the prompts that warm it up.
- `worker`: the code inside vLLM's process that takes weights from a file. `map_ahead`: lets it map the file before.
- `plugin`: ends vLLM's processes with their generator, and lets them record experts on a CPU.
- `stats`: the engine's gauges. `routes`: the experts that it chooses for each token.
"""
