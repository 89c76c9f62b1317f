"""Engine on vLLM, in a child process of the generator.

`engine` runs in the generator; `worker` and `plugin` run in vLLM's processes.
"""
