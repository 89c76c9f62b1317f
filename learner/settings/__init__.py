"""Tables of the run file inside `[learner]`. `learner.settings.learner` has `[learner]` itself.

- `sampling`: how trajectories are sampled. `evaluation`: sets of held-out tasks.
- `algorithm`: the objective, composed of `advantages`, `corrections`, `surrogates`, `regularisers` and a `critic`.
- `optimizer`: AdamW. `lora`: adapters of low rank.
- `replay`: the replay table.

Settings of rewards, comparisons and families stand beside their code, in `learner.credit` and `learner.families`.
"""
