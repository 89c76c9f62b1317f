"""Families: a group that has been delivered answers with further tasks, and all are trained together. Pure.

- `family_config`: the settings `[learner.family]`. `family`: the groups of a family, and what comes of them.
- `reactions`: which tasks a family asks for next, and what of it is trained; one function of each kind of family.
- `hints`: hints to tasks that no member solved. `drafts`: the best draft becomes a part of the prompt.
- `answer_config`: the settings of kinds whose second group reads the first one.
- `refining`: episodes that are played anew with the true future of an earlier one.
- `judging`: answers that the policy judges itself, and judgements that are trained.
- `retries`: wrong episodes are tried again. `guidance`: solved examples of other tasks. `transcripts`: their texts.
- `branching`: episodes that begin in the middle of others, and the credit of what they share.
- `waiting`: the families that wait for groups, on their way between deliveries and units.
- `wiring`: makes the part of a learner that keeps them. `recorded`: families of a recording.
"""
