"""Comparing runs of `train.py`.

From the bottom: `outcome.py` says what an arm and its result are, `rates.py` finds learning rates, `grid.py` makes
runs, `report.py` compares them, `plots.py` draws, and `run.py` is the command.
"""
