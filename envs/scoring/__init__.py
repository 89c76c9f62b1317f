"""Questions and scores of reasoning_gym, and programs of a model, in separate processes with few rights.

Suites use `scorer` and `programs`. Both start workers by `worker_process`, inside bubblewrap where that is possible;
`programs` starts none elsewhere. A worker gives up its rights by `confinement` before it reads what a model wrote. The
`worker` of a scorer sees Python's packages and this one, so `worker`, `confinement` and `questions` import nothing of
Offbeat but each other and `envs.errors`. A `program_worker` sees the standard library and this folder. It runs a
program and its tests apart from each other, in `program_process`.
"""
