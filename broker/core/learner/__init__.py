"""The broker's side towards the learner. Pure.

- `learner_side`: how the broker handles the learner's messages, and delivers units to it.
- `takeover`: what a new learner process does to the units of the one before. `released`: its line of steps.
- `holdings`: what the broker holds of a learner that joins. `notices`: units that the learner will never get.
"""
