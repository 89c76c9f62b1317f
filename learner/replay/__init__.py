"""The replay table (replay buffer): rollouts that may be trained again (`[learner.replay]`).

`table.ReplayTable` keeps them and draws by a rule; `batch` mixes what was drawn with what arrived.
"""
