"""Suite `openenv`: environments behind servers of Meta's OpenEnv, over their WebSocket protocol.

- `connection`: one session of a server: messages, deadlines and errors. `suite`: the suite and its episodes.
"""
