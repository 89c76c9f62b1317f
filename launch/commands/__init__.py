"""Verbs on a run: `journal` (with `journal_arguments`, `journal_export`), `keys`, `status`, `samples`, `retrain` and
`evaluate`. `envs` (with `envs_arguments`) serves an environment.

`ended` shows a run that has ended. `recording` reads from the journal the steps that `retrain` trains again.
"""
