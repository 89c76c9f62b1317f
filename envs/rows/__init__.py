"""Suite `rows`: one task for each row of a data set, scored by reward functions of the user.

`reading` reads rows, keeps some of them out of training, and orders the others; `prompts` makes messages of a row. A
reward is a function in one of the two forms of `reward_functions`, or a `judge`, which is a language model.
"""
