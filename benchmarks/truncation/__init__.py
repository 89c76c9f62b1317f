"""Wall time to the same reward: windows, finished responses, whole batches."""
