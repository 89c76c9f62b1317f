"""The replay table (replay buffer): rollouts that may be trained again (`[learner.replay]`).

- `table`: the table. `rules`: what is drawn, and when. `batch`: mixes replayed rollouts into a batch.
- `file`: the table on disk.
"""
