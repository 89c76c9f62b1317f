"""The broker's side towards generators, and what actors hear of them. Pure.

- `generator_side`: how the broker handles generators, and which actors they admit.
- `generator_list`: the list of generators for actors. `weights_news`: news of policy versions for generators.
"""
