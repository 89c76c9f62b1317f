"""The run file: `sections` are its types, `load` reads it, `rules` and `method_rules` refuse what cannot work.

- `recipes`: the shipped run files. `keys_folder`: where a run's keys are.
"""
