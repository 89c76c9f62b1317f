"""A policy version as files, and its way to other hosts.

- `format`: manifest and safetensors file; `files`: writes and verifies them; `preallocated`: a file made ahead of
  its content.
- `chunks`: a version in hashed pieces; `delta`: a version as the difference from another one.
- `server`, `open_versions`: the HTTP server of versions, and the versions that it holds open.
"""
