"""Samples: what the model wrote, as texts in ``samples.jsonl`` of the run folder. Without torch.

- `sample`: one line of the file, and how it is read. `choice`: which trajectories are kept.
- `texts`: token ids as bounded texts. `sample_log`: writes the file, rotates it, and goes back with a checkpoint.
- `show`: samples in words, as a Markdown table, and without control characters.
"""
