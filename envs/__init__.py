"""Environments: suites of tasks and their scoring. They know neither the model nor the wire format.

`envs.base` has the interfaces, and `envs.registry` makes the suite that a run file names. The suites of data are in
rows/, tools/ and agent/; those of other libraries and servers in gym/, openenv.py and remote/. What a model writes is
read in one place for all of them: its calls in `envs.calls`, messages in `envs.messages`.
"""
