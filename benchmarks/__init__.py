"""Programs that compare Offbeat with a peer or a limit: `python -m benchmarks.NAME`, each with `--help`.

Speed is measured by `adapters`, `broker`, `generation`, `gpu`, `learner`, `plan`, `ratios`, `versus_trl`, `view` and
`weights`.
Learning is measured by `async_vs_sync`, `lag_price`, `claims` and `truncation`, which train in `real_system` on the toy
tasks of `envs`, and by `frontier`, which trains in one process.
Results are JSON files, from which `page` fills the docs. Campaigns of faults and fuzzing are in tests/campaigns.
"""
