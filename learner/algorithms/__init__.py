"""Pure functions of tensors, one topic per file.

- `ratios`, `levels`, `corrections`, `staleness`: how far policies are apart, and what corrects it.
- `advantages`, `comparisons`, `values`, `truncation`: credit, the critic's targets, and unfinished trajectories.
- `ppo`, `surrogates`, `penalties`, `clipping`: the objective of a token. `aggregation`: from tokens to one number.
- `regularisers`: KL and entropy. `entropy/`: clips and masks by the entropy. `risk`: risk measures.
- `replay`: which rollouts are trained again. `replay_gates`: when they count.
- `routes`: weights of experts that were chosen earlier.
- `shapes`: checks in the first lines of public functions.
"""
