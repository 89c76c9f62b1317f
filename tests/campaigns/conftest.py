"""What is no module of this Python: it needs an extra, runs in an environment of its own, or changes the clock."""

collect_ignore = ["fuzz/guided.py", "harnesses/verifiers_sums.py", "faults/clock/sitecustomize.py"]
