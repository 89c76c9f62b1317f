"""Verbs that look into a run: `journal` (with `journal_arguments`, `journal_export`), `keys`, `status`, and
`retrain`, which reads its steps with `recording`.
"""
