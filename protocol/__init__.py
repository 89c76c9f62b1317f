"""What crosses a process boundary: messages, codec, transport. See SPEC.md in this folder."""
