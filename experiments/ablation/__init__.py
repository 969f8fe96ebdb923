"""Comparing runs of `train.py`: arms, their runs, and what to say about them.

From the bottom: `outcome.py` says what an arm and its result are, `grid.py` makes runs, `comparison.py` and `costs.py`
compute, `tables.py`, `report.py`, `plots.py` and `page.py` show them, and `run.py` is the command.
"""
