"""The broker's decisions: messages and time in, actions out. No sockets, no clocks, no disk.

- `dispatch`: entry point; `actor_side`, `learner_side`: what each role may say and what follows from it.
- `state`: everything that lasts, changed by `events` alone; `records`: its plain data.
- `tasks`, `assembly`, `deliveries`: a task's, a segment's and a unit's life. `ledger`: what became of every token.
- `admission`, `peers`, `recent`: size and lag bounds, who is connected, what is over. `store`: where bytes are kept.
"""
