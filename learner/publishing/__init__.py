"""Brings new policy versions to the generators.

- `publisher`: publishes versions, one at a time; a thread finishes each behind the learner's next step.
- `weight_copy`: copies weights out of the model into the memory of a version.
"""
