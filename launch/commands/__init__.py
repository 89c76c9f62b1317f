"""Verbs on a run: `journal` (with `journal_arguments`, `journal_export`), `keys`, `status`, `samples`, `retrain` and
`evaluate`. `envs` (with `envs_arguments`) serves an environment.

`find_run` finds the run. `status_page` is the page of `status`, and `ended` that of a run that has ended. `recording`
reads from the journal the steps that `retrain` trains again.
"""
