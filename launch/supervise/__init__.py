"""`offbeat train`: starts the roles of one host, watches them, starts them again, writes the summary.

- `supervisor`, `crew`: start and stop the processes. `posts`: which ones there are, and how one ended.
- `interrupt`: turns signals into an orderly stop. `model_process`: makes or downloads the model first.
- `stopping`: ends them in order. `state_file`: the record of them for `offbeat status`.
- `health`, `weights_health`, `restarts`: decide which process hangs, and when it may start again. Pure.
- `learner_time`: how long the learner may train, stop and exit. Pure.
- `memory_errors`: tells from a log that a process had too little memory. Pure.
- `broker_status`: asks the broker. `starting`: who has joined it.
- `terminal/`: shows the run to a person.
- `summary`, `learning_curve`: the record and the picture of a finished run in its folder.
- `shared_memory`: removes folders in shared memory whose owner is gone.
"""
