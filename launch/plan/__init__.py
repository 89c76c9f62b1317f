"""`offbeat plan`: predicts what a run would do with other numbers of generators and actors.

- `command`, `arguments`: the verb. `model`, `simulation`: simulate a run on a virtual clock. Pure.
- `clock`, `parts`, `actors`, `ledger`: what the simulation is made of. Pure.
- `rates`, `rates_file`: measured rates. `calibration`, `probe`, `reading`: measure them.
- `last_run`: rates from the metrics of an earlier run.
"""
