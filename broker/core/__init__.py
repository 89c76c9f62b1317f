"""The broker's decisions: messages and time in, actions out. No sockets, no clocks, no disk.

- `dispatch`: entry point. `actor_side`: how the broker handles the messages of actors. `outbox`: actions.
- `learner/`, `generators/`: the sides towards the learner and the generators.
- `state`: the lasting state, changed by `events` and segments alone. `records`: its plain data.
- `tasks`, `assembly`, `deliveries`: the life of a task, a segment and a unit. `ledger`: outcomes of tokens.
- `admission`: bounds of size and lag. `peers`: who is connected. `recent`: what is over. `store`: the bytes.
- `episodes`: counts of episodes that ended or failed. `gauges`: the gauges of a run.
"""
