"""Pure functions of tensors, one topic per file."""
