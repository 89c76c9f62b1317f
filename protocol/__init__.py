"""The wire protocol between processes, and the tools that every role needs for it.

SPEC.md in this folder is the contract. `messages/` has the messages, `codec` their frames, `session` and `sockets` the
connection that carries them. `security/` knows keys and peers, and no weights; `weights/` knows how a policy version
travels.
"""
