"""Keys, encryption and admission of peers. This package does not depend on weights.

- `keys`, `key_files`, `key_checks`: read, write and check the keys folder.
- `client`: the client's half of CURVE; `guard`, `handshakes`, `connections`: the server's half.
- `addresses`: which addresses may be bound. `http_token`, `http_tls`, `http_serving`: the security of HTTP.
"""
