"""Command line, run file, supervisor, and the start of each role's process. Holds no logic of a role.

`offbeat train` goes through `cli`, `preflight.examine` and `supervise.supervisor`, which starts each role by `role`;
with `--in-process` it goes through `in_process`, which has all roles in one event loop. `by_hand` starts one role in a
terminal. The walls are between supervising, planning and the verbs that look into a run.
"""
