"""Command line, run file, supervisor, and the start of each role's process. Holds no logic of a role.

- `cli`, `arguments`: the command `offbeat`. `commands/`: its verbs on an existing run. `plan/`: `offbeat plan`.
- `reference/`: writes the pages of docs/ that are generated from the code.
- `preflight/`: tries folder, model and environment before anything starts.
- `run_file/`: sections, loading, rules. `run_folder`, `model`, `tokenizer`: a run's folder and model.
- `gguf`: makes model folders from GGUF files. `known_models`: models that need no hub.
- `resuming`: what `--resume` goes on from.
- `placement`: which GPUs each process gets. `hardware`: settings that follow from them.
- `role`, `by_hand`, `ranks`, `weights_role`, `judge_role`: run one role in one process. `supervise/`: `offbeat train`.
- `processes/`: child processes that die with their parent. `logs`, `errors`, `exit_codes`: for all roles.
"""
