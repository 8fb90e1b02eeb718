"""Repeats tables and comparisons of the papers from a checkout; not part of the installed package.

`python -m experiments.choice` compares presets over tasks and seeds, `python -m
experiments.paper_table` prints the few-bit paper's table of activation memory.
"""
