"""Suite `gymnasium`: environments of the package gymnasium, with their observations as texts.

- `suite`: the suite and its episodes. `texts`: observations as texts, and the action in what the model writes.
"""
