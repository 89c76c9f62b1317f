"""The replay table (replay buffer): rollouts that may be trained again (`[learner.replay]`).

- `table`: the table. `entry`: an item in it. `from_config`: makes the table of a run.
- `rules`: what is drawn, and when. `batch`: mixes replayed rollouts into a batch.
- `file`: the table on disk.
"""
