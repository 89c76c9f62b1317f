"""Measure what methods do for the tasks that they were made for, against a baseline, on paired seeds.

A claim names its arms and its bar. A cell is one arm with one seed, and a verdict rests on the differences of cells
with equal seeds. Settings of the tasks are in `tasks/`.
"""
