"""A policy version as files, and its transfer to other hosts.

- `format`: manifest and safetensors file; `files`: writes and verifies them; `preallocated`: a data file
  whose memory is allocated before its content is known.
- `model_folder`: the tensors of a Hugging Face folder that a version replaces.
- `chunks`: a version in hashed pieces; `delta`: a version as the difference from an earlier one.
- `server`, `open_versions`: the HTTP server of versions, and the versions that it holds open.
"""
