"""Verbs on a run: `journal` (with `journal_arguments`, `journal_export`), `keys`, `status` and `retrain`.

`recording` reads from the journal the steps that `retrain` trains again.
"""
