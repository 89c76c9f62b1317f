"""Questions and scores of reasoning_gym from a separate process with few rights.

- `scorer`: what suites use. `counters`: what it counts.
- `worker_process`: starts the worker, and sends it requests. `worker`: the worker.
- `questions`, `family`: the questions of a family, and its settings. `canaries`: answers whose scores are known.
- `answer_process`: a process for each answer. `notation`: what an answer may be made of.
- `sandbox`, `confinement`: how the worker is confined.
"""
