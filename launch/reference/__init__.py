"""Pages of docs/ that are made from the code: `python -m launch.reference FOLDER` writes them.

- `configuration`: configuration.md, from the run file's sections. `metrics`: the tables of metrics.md, from the gauges.
"""
