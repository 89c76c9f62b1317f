"""The suite `rows`: one task for each row of a data set, scored by reward functions of the user.

- `suite`: the suite. `episode`: its episodes. `reading`: rows from files. `prompts`: messages from a row.
- `splitting`: held-out rows, and the order of an epoch. `reward_functions`: the two forms of reward functions.
- `reward_processes`: processes for reward functions. `judge`: a reward from a language model.
"""
