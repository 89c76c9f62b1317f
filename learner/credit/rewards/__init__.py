"""Rewards: from those that the environment gave to those that the policy is trained on.

- `composition`: the order of the steps, gates, and weights by stage.
- `answer`: the value of an answer by itself. `group`: its value beside the other answers of its group.
- `made`: rewards that no environment gives.
- `sums`: sums by name, and the replacement of rewards.
"""
