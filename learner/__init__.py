"""The learner role: trains on what the broker delivers. The only folder with torch and DeepSpeed.

Begin with `trainer.Trainer.learn`, one learner step: take a batch, update, publish a version, commit, report.
`run.TrainingRun` has a trainer, and adds what a whole run needs: evaluations, checkpoints, going on. `main` wires both.

A batch comes from `intake`, the rollout buffer, which is without torch. `rewards`, `comparisons` and `advantages` make
from its trajectories what `update` trains on, by the pure functions of `algorithms`.
"""
