"""The wire protocol between processes, and the tools that every role needs for it.

SPEC.md in this folder is the contract.

- `messages/`: one Struct per message; `codec`: messages to frames and back; `envelopes`: several messages in
  one ZeroMQ message.
- `session`: a peer's side of the connection, without sockets; `link`, `sockets`: the connection over ZeroMQ.
- `version_line`: how far two policy versions are apart. `errors`: the tree of errors.
- `names`: names of tasks, trajectories and units. `arrays`: the arrays of a segment. `gauges`: the gauges of
  heartbeats. `whole_files`: files that are written whole or not at all. `private_paths`: files in
  shared memory.
- `failures`: failures of episodes, and their counts.
- `orphans`: a process ends with its parent. `gpu_lock`: who may use a shared GPU. `section`: the base class of the run
  file's sections.
- `security/`: keys, CURVE, TLS and the HTTP token.
- `weights/`: a policy version as files, and its transfer over HTTP.
"""
