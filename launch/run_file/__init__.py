"""The run file: `sections` has its types, `load` reads it, `rules` and `method_rules` reject mistakes.

- `recipes`: the shipped run files. `keys_folder`: finds or makes a run's keys.
"""
