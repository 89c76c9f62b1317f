"""Verbs on a run: `journal` (with `journal_arguments`, `journal_export`), `keys`, `status`, `samples`, `retrain` and
`evaluate`.

`ended` shows a run that has ended. `recording` reads from the journal the steps that `retrain` trains again.
"""
