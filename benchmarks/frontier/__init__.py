"""The staleness frontier: rows of recipes over exact policy lag, measured in one process.

`sampler` is a plain sampler of tiny models, `loop` trains one cell with the learner's own engine, `cells` names what is
measured, `program` measures it, and `page` writes docs/staleness.md.
"""
