"""Wall time to the same reward when training on windows, on finished responses, or on whole batches."""
