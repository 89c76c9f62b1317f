"""What the learner makes of rewards: from named rewards to the values that are compared, and the comparisons.

- `reward_config`, `rewards/`: from the rewards that the environment gave to those that are trained on.
- `comparison_config`, `compared`: advantages that are sums of comparisons.
- `bundles`: a risk measure of bundles of groups.
- `short_forms`: kinds of advantage that are names of one comparison. `signal`: groups that would train nothing.
- `needs`: names of rewards and marks that the settings rely on.
"""
