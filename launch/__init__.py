"""One run file for all roles: command line, supervisor, roles as processes. Holds no logic of a role.

- `cli`: the command `offbeat`; `commands/`: its verbs that look into a run; `plan/`: `offbeat plan`.
- `reference/`: pages of docs/ that are made from the code.
- `run_file/`: sections, loading, rules. `run_folder`, `model`, `tokenizer`: what a run starts from.
- `role`, `by_hand`, `weights_role`: one role in one process. `supervise/`: `offbeat train`.
- `processes`: child processes that die with their parent. `logs`, `errors`, `exit_codes`: of every process.
"""
