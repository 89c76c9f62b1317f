"""Whether an unchanged langgraph agent gets better: `python -m benchmarks.agent_learning`.

- `program`: trains seeds, and makes table and picture; `agent_learning.toml` is the run file.
- `rows`: the tasks; `agent`: the agent, which knows nothing of Offbeat; `worker`: hands rows to it.
"""
