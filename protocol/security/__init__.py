"""Keys, encryption and admission of peers. This package does not depend on weights.

`keys` and `key_files` read and write the keys folder. `client` and `guard` are the two halves of CURVE, `http` is the
security of a run's HTTP servers, and `addresses` says which addresses may be bound.
"""
