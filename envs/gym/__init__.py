"""Suites of other libraries: `gymnasium`, with its observations as texts, and `skyrl_gym`.

- `suite`: the suite `gymnasium` and its episodes. `texts`: texts of observations, and the action in a text.
- `skyrl`: the suite `skyrl_gym` and its episodes.
"""
