"""The broker process: leases tasks to actors, journals segments, hands finished units to the learner.

- `service`: the loop around the sockets. `peer_socket`: the socket for peers; `identities`: which connection
  speaks for which peer; `encoder`: encodes what leaves; `listening`: the limit of open connections.
- `output_commit`: holds messages back until the journal has the records they rest on. `dead_letters`: keeps
  messages that could not be handled.
- `recovery`, `journal_store`: the state as the journal has it. `http_pages`: serves `/status` and
  `/metrics`; `status`, `waits`, `gauges`: their content.
- `config`, `errors`: settings and errors.
- `core/`: every decision, pure. `journal/`: the write-ahead journal, which does not know tasks.
"""
