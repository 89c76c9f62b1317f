"""Measure whether the named part of each recipe acts, on episodes that the recipe's own job has sampled.

`episodes` keeps recorded steps of the shipped jobs in small files, `table` is a policy of one row of logits for each
context, `parts` names the part of each recipe, and `measure` takes a step with the part and one without it.
"""
