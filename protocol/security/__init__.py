"""Who may speak to whom. Knows nothing of weights.

- `keys`, `key_files`, `key_checks`: the keys folder, read, written and checked.
- `client`: the client's half of CURVE; `guard`, `handshakes`, `connections`: the server's half.
- `addresses`: which addresses may be bound. `http_token`, `http_tls`, `http_serving`: the HTTP side.
"""
