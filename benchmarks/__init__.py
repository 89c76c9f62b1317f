"""Programs that compare Offbeat with a peer or a limit: `python -m benchmarks.NAME`, each with `--help`.

- Speed: `broker`, `generation`, `learner`, `weights`, `scaling`, `endtoend`, `ratios`, `versus_trl`, `plan`,
  `agent_cost`.
- Learning: `async_vs_sync`, `claims`, `staleness`, `truncation`, `seeds`, `agent_learning`.
- Every method and way to run, for a few steps: `every_way`.
- Campaigns against the real system and its parsers: `faults`, `fuzz`.
- `agent_process`: a process of agents, to which rows are handed.
- `envs/`: the toy tasks of the benchmarks.
"""
