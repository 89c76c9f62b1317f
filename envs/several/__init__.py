"""Suite `several`: each task of a run belongs to one of several environments.

- `suite`: the suite and its episode. `tables`: the checked ``[[env]]`` tables of the run file.
- `dealing`: which environment a task belongs to.
"""
