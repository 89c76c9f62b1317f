"""Turns the broker's messages into units that can be trained. Without torch.

- `exchange`: collects batches and evaluates. `broker_wait`: waits, with a deadline.
- `broker_connection`: sends and receives the messages. `task_messages`: tasks in messages.
- `deliveries`: takes what was received into the intake. `commit_sender`: sends commits.
- `intake`: the units, from their delivery to their commit. `trajectories`: segments to trajectories with rewards.
- `curriculum`: decides which tasks come next, and how many.
- `open_trajectories`: segments of unfinished trajectories.
- `unit_commits`: what is here, dropped or committed; `commit_memory`: the committed units.
- `evaluation`: runs an evaluation, and its result; `pass_at`: pass@k and intervals.
- `signal_watch`: tells when nothing that arrives can be trained.
- `token_audit`: checks that every delivered token is accounted for.
"""
