"""`offbeat train`: starts the roles of one host, watches them, starts them again, writes the summary.

`supervisor` has the run from its start to its summary, `crew` its processes, and `posts` one process each. `health`
decides what hangs and what may start again, from what the broker and the kernel say; it is pure. `panel` shows the run.
"""
