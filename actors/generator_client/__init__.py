"""How an actor asks generators for tokens.

- `pool`: the connections to all generators; chooses one for each turn, and moves on if it fails.
- `connection`: the connection to one generator.
- `turn_request`: one turn that is asked for, and its message. `chunks`: the tokens that come back.
"""
