"""The objective of an update, put together from `learner.algorithms`.

- `objective`: the loss. `surrogate`, `corrections`: its parts by the config. `tokens`: its inputs and measurements.
- `scores`: what the objective must know of a batch's tokens before the first optimizer step.
- `selection`: the tokens of a micro-batch for it. `balance`: clip bounds for a mini-batch.
- `adaptive`: settings that change from step to step.
"""
