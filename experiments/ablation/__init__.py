"""Comparing runs of `train.py`.

From the bottom: `outcome.py` says what an arm and its result are, `grid.py` makes runs, `comparison.py` computes,
`report.py` and `plots.py` show, and `run.py` is the command.
"""
