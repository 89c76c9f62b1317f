"""Every message of the protocol, one Struct each, and for every field who writes it, who reads it, and why.

SPEC.md says when a message is sent and what follows.

Structs are encoded as MessagePack maps whose key ``type`` names the message. A decoder ignores keys that
it does not know, and the broker forwards the *bytes* of segment headers, so unknown fields reach the learner.
All times on the wire are durations in seconds: clocks of two hosts are never compared.

The broker writes tasks, segments, the learner's Hello, commits and publications to its journal.
`offbeat journal` shows them, and `offbeat retrain` reads them.

- `peers`: any role and the broker: a peer joins, tells that it lives, and leaves.
- `tasks`: episodes to run. `segments`: what an actor sends of them. `delivery`: units for the learner, and commits.
- `weights`: news of policy versions. `generators`: actors and generators.
- `fields`: types of fields with their bounds. `array_specs`: arrays in a body. `any_message`: the union of all.
"""
