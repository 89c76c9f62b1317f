"""Suites of other libraries: `gymnasium`, with its observations as texts, `minigrid`, `skyrl_gym` and `textworld`.

- `suite`: the suite `gymnasium` and its episodes. `texts`: texts of observations, and the action in a text.
- `minigrid`: the suite `minigrid`. `rooms`: texts of its rooms, and the ways through them.
- `skyrl`: the suite `skyrl_gym` and its episodes. `textworld`: the suite `textworld` and its episodes.
- `library_lock`: lets one thread at a time into a library.
"""
