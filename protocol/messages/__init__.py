"""Every message of the protocol, one Struct each, and for every field who writes it, who reads it, and why.

SPEC.md says when a message is sent and what follows.

Structs are encoded as MessagePack maps whose key ``type`` names the message. A decoder ignores keys that
it does not know, and the broker forwards the *bytes* of segment headers, so unknown fields reach the learner.
All times on the wire are durations in seconds: clocks of two hosts are never compared.

The broker writes tasks, segments, the learner's Hello, commits and publications to its journal.
`offbeat journal` shows them, and `offbeat retrain` reads them.

`episodes` has what a task becomes: leased, sampled, delivered, committed. `peers` has what peers say of themselves, of
generators and of policy versions. `fields` has the types of fields with their bounds.
"""
