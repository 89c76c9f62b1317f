"""The run file: `sections` has its types, `load` reads it, `rules` and `method_rules` reject mistakes.

- `method_effect`: settings of a method that have no effect.
- `shipped`, `recipes`: the run files that come with Offbeat. `keys_folder`: finds or makes a run's keys.
"""
