"""Questions and scores of reasoning_gym from a separate process with few rights.

Suites use `scorer`. It starts a `worker` by `worker_process`, inside bubblewrap where that is possible; the worker
gives up its rights by `confinement` before it reads an answer. Only this package is visible in there, so `worker`,
`confinement` and `questions` import nothing of Offbeat but each other and `envs.errors`.
"""
