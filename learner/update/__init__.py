"""The learner's update: trajectories in, new weights out.

- `engine`: the entry point, on rank 0; `rank_engine`: what every rank does. `updater`: one update on one rank;
  `outcome`, `report`: what an update did.
- `credit_assignment`, `estimates`: rewards to advantages. `batching`: trajectories to micro-batches.
- `objective`: the objective, put together from `learner.algorithms`.
- `policy`, `target_logp`, `critic`, `frozen`: the models. `deepspeed_zero`, `ranks`: the machinery.
- `device`: what depends on the device that computes: kernels, and what makes torch fast.
- `gathering`: whole weights from shards; `pretrained`: the model as a folder.
"""
