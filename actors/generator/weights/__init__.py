"""New policy versions on their way into the engine.

- `updater`: loads announced versions, one at a time. `staging`: verifies a version before it is loaded.
- `cache`, `fetch`, `source`: fetch a version once per host, in chunks, from any host that has it.
  `cache_folder`: the folder that its processes share, with its locks.
- `relay`: serves fetched versions to other hosts.
- `tensor_file`: reads tensors from the bytes of a safetensors file. `to_device`: brings them to a GPU.
  `file_ahead`: maps the file before it is loaded.
"""
