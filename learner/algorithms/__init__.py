"""Pure functions of tensors, one topic a file."""
