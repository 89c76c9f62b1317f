"""The run file: `sections` has its types, and `load` reads it and explains what is wrong with it.

A rule of one section stands beside its fields, those of `[learner]` as a whole in `learner.settings.rules`, and
those between roles in `rules`.
"""
