"""What methods do for the tasks that they were made for, against a baseline, on paired seeds.

- `claims`: the arms, and the bar of each claim. `tasks/`: settings of the tasks.
- `cells`: one run. `verdicts`: paired differences, intervals and verdicts.
- `table`: tables and figure. `program`: the command line.
"""
