"""Tries a run file before anything starts: folder, model, environment, chat template, adapters, memory, GPUs.

`examine` is the entry point, of `offbeat check` and of `offbeat train`. Whatever loads torch or a GPU is tried in a
process of its own.
"""
