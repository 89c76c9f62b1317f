"""What the terminal of a run shows.

- `panel`: writes the notes, the live line and the table at the end.
- `progress_line`, `end_table`: what the live line and the table say. Pure.
- `metrics_tail`: reads the metrics while a learner writes them. `episodes`: sentences on what became of episodes.
- `sample_lines`: what the model wrote, under the line of an evaluation.
"""
