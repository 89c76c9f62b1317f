"""What crosses a process boundary, and what every role needs for it. SPEC.md in this folder is the contract.

- `messages`: one Struct a message; `codec`: messages to frames; `envelopes`: one ZeroMQ message a turn.
- `session`: a peer's side of the conversation, pure; `link` and `sockets`: the same over ZeroMQ.
- `version_line`: how far two policy versions are apart. `errors`: the tree of errors.
- `names`: identity strings. `arrays`: the arrays of a segment. `whole_files`: files written whole or not at all.
- `orphans`: no process outlives its parent. `section`: the base class of the run file's sections.
- `security/`: keys, CURVE, TLS and the token of HTTP. `weights/`: a policy version as files, and its way over HTTP.
"""
