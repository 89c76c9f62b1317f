"""Batching: trajectories to micro-batches, by pure functions of arrays.

- `batch`: lays trajectories out, and decides which tokens carry gradient.
- `cutting`: cuts a mini-batch into micro-batches. `micro_batch`: the input of one pass.
- `mini_batch`: the tokens of an optimizer step.
- `packing`: deals trajectories to mini-batches, and rows to micro-batches and ranks.
- `sharing`: rows in which the shared beginning of several trajectories appears once.
"""
