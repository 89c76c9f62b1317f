"""Suites of other libraries: `gymnasium`, with its observations as texts, `minigrid`, `skyrl_gym` and `textworld`.

Each library is imported when its suite is made, so none has to be installed for the others.
"""
