"""`offbeat train`: starts the roles of one host, watches them, starts them again, writes the summary.

- `supervisor`, `crew`: who runs. `health`, `restarts`: who hangs, and when it may start again. Pure.
- `broker_status`: asks the broker. `panel`, `summary`: what a person sees.
- `shared_memory`: folders in shared memory whose owner is gone.
"""
