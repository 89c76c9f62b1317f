"""The broker's decisions: messages and time in, actions out. No sockets, no clocks, no disk.

- `dispatch`: entry point. `actor_side`, `learner_side`: how the broker handles the messages of each role.
- `state`: the lasting state, changed by `events` and segments alone. `records`: its plain data.
- `tasks`, `assembly`, `deliveries`: the life of a task, a segment and a unit. `ledger`: outcomes of tokens.
- `generator_list`, `weights_news`: what actors and generators hear. `released`: the learner's line of steps.
- `admission`: bounds of size and lag. `peers`: who is connected. `recent`: what is over. `store`: the bytes.
- `episodes`: counts of episodes that ended or failed.
"""
