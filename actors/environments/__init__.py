"""Environments inside an actor.

- `live_suite`: the suite of an actor. `runner`: runs the code of environments away from the actor's event loop.
  `environment_loop`: the thread for its coroutines. `worker_threads`: threads for its plain functions.
- `results`: checks of what environments return.
"""
