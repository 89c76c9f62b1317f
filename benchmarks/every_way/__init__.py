"""Runs a job in every way that Offbeat has; `program.py` says how to start it.

- `cases.py`: the ways: methods, ranks and ZeRO stages, number formats, adapters, faults, resumption.
- `running.py`: one run of the real system, its peak memory by role, and what must hold at its end.
- `program.py`: the command line, and the table.
"""
