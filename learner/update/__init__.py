"""From trajectories to new weights.

- `engine`: trajectories in, weights out; `updater`: one update on one rank; `report`, `outcome`: what it did.
- `credit_assignment`, `estimates`: rewards to advantages. `batching`, `packing`: trajectories to micro-batches.
- `scores`, `objective`, `adaptive`, `schedule`: the objective, put together from `learner.algorithms`.
- `policy`, `target_logp`, `critic`, `frozen`: the models. `deepspeed_zero`, `ranks`, `cpu`: the machinery.
"""
