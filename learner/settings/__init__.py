"""Settings of the learner: `[learner]` of the run file (`learner`) and the tables inside it, and their rules.

A file has the fields of its tables, what each means, and what the values of one table forbid each other
(`contradictions`). `rules` has what several tables forbid each other, and the remarks. So whoever asks whether a field
acts reads its file and `rules`.
"""
