"""From the broker's messages to units that can be trained. No torch.

- `exchange`: the conversation with the broker; `intake`: deliveries to units, commits back.
- `curriculum`: which tasks come next, and how many. `open_trajectories`: windows of unfinished trajectories.
- `commit_memory`: which units are done with. `token_audit`: every delivered token is accounted for.
"""
