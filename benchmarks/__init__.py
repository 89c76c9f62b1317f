"""Programs that print ratios beside a peer or a limit: `python -m benchmarks.NAME`, each with `--help`.

- Speed: `broker`, `generation`, `learner`, `weights`, `scaling`, `endtoend`, `ratios`, `versus_trl`, `plan`.
- Learning: `async_vs_sync`, `staleness`, `truncation`, `seeds`. Campaigns: `faults`, `fuzz`.
- `envs/`: the toy tasks of benchmarks.
"""
