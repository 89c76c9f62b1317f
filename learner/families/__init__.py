"""Families: a group that has been delivered answers with further tasks, and all are trained together. Pure.

`reactions` asks for the next tasks of a family and settles what is trained of it; a kind of family is a function there.
What later tasks begin from is in `notes` (words behind the prompt) and `branching` (the middle of an episode). The
rollout buffer keeps families that wait, see `learner.intake.waiting_families`.
"""
