"""Every metric that the learner reports: tag, unit, meaning. These tables make docs/run/metrics.md.

- `rollout`, `families`, `replay`: trajectories as they arrive, groups that wait for others, and the replay table.
- `update`: the update, with what only some methods or a critic report. `histograms`: distributions of a step.
- `evaluation`: held-out tasks.
- `declared`: looks up one metric in all tables.
"""
