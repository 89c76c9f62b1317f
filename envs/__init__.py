"""Environments: suites of tasks and their scoring. They know neither the model nor the wire format.

- `base`: the interfaces. `registry`: makes the suite that the run file names. `config`, `errors`: as everywhere.
- `user_code`: finds functions and classes in a user's files.
- `rows/`, `tools/`, `agent/`, `gym/`, `calculator`, `reasoning_gym_suite`: the suites that ship.
- `several/`: deals the tasks of a run to several environments. `remote/`: environments on other hosts.
- `openenv/`: environments behind servers of OpenEnv.
- `scoring/`: questions and scores of reasoning_gym from a separate process.
- `blame`: the line of user code that failed or that blocks.
"""
