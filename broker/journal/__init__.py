"""The write-ahead journal: numbered records in files, durable before anybody hears of them. Knows no tasks.

- `journal`: the journal that is open; `writer`: its thread; `records`: the bytes of a record.
- `opening`, `files`: takes a folder, checks and repairs it. `config`: `[broker.journal]`.
"""
