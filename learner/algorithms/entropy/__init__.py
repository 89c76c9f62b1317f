"""Entropy: how an update changes it, and objectives that look at it.

- `change`: the first-order effect of an update, and tokens that lower the entropy most.
- `balance`: a clip that keeps gradient, and entropy in advantages (AEPO).
- `bounds`: clip bounds by a token's entropy (HAPO).
"""
