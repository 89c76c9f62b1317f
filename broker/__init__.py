"""The broker process: leases tasks to actors, journals segments, hands finished units to the learner.

- `service`: the loop around sockets; `identities`: which connection speaks for which peer;
  `listening`: where it may bind.
- `output_commit`: holds messages back until the journal has what they rest on.
- `recovery`, `journal_store`: the state as the journal has it. `status`, `waits`, `gauges`: what
  `/status` and `/metrics` show.
- `core/`: every decision, pure. `journal/`: the write-ahead journal, which knows no tasks.
"""
