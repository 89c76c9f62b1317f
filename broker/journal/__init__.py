"""The write-ahead journal: numbered records in files, durable before any peer hears of them.

It does not know tasks. `journal` is the open journal, and docs/understand/journal.md has the format.
"""
