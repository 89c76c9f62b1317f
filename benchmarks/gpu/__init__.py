"""Measure what one GPU reaches with Offbeat, each figure beside a bare loop that does only what has to be done.

`program` runs the steps, each in a process of its own, so the next one finds the GPU empty. A step is a file with a
function `measure`, which takes a `GpuSetting` and returns figures.
"""
