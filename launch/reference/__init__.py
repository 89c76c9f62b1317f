"""Pages of docs/ that are generated from the code: `python -m launch.reference FOLDER` writes them.

- `configuration`: writes configuration.md from the run file's sections.
- `metrics`: writes the tables of metrics.md from the gauges.
"""
