"""`offbeat train`: starts the roles of one host, watches them, starts them again, writes the summary.

- `supervisor`, `crew`: start and stop the processes. `posts`: which ones there are, and how one ended.
- `health`, `restarts`: decide which process hangs, and when it may start again. Pure.
- `memory_errors`: tells from a log that a process had too little memory. Pure.
- `broker_status`: asks the broker. `starting`, `panel`: show the run to a person.
- `progress_line`, `end_table`: what the panel's live line and its table at the end say. Pure.
- `summary`: `summary.json`.
- `learning_curve`: the picture in the run folder.
- `metrics_tail`: reads the metrics while a learner writes them. `episodes`: sentences on what became of episodes.
- `sample_lines`: what the model wrote, under the line of an evaluation.
- `shared_memory`: removes folders in shared memory whose owner is gone.
"""
