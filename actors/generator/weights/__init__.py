"""New policy versions on their way into the engine.

- `updater`: takes announced versions in turn; `staging`: proves a version whole before it is loaded.
- `cache`, `fetch`, `source`: fetched once per host, in chunks, from any host that has it. `relay`: passed on to others.
- `tensor_file`: tensors in the bytes of a safetensors file.
"""
