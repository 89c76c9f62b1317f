"""`offbeat train`: starts the roles of one host, watches them, starts them again, writes the summary.

- `supervisor`, `crew`: start and stop the processes.
- `health`, `restarts`: decide which process hangs, and when it may start again. Pure.
- `broker_status`: asks the broker. `panel`, `summary`: show the run to a person.
- `shared_memory`: removes folders in shared memory whose owner is gone.
"""
