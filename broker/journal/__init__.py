"""The write-ahead journal: numbered records in files, durable before any peer hears of them.

It does not know tasks.

- `journal`: the open journal. `writer`: its thread. `write_queue`: what is not written yet.
- `readers`: open files to read single records. `space`: room on the disk and under the limit.
- `records`: the bytes of a record. `files`: the files of a folder. `survey`: check them. `opening`: repair them.
- `claim`: hold a folder. `mark`: how much of it the disk has. `retention`: delete files. `config`: `[broker.journal]`.
"""
