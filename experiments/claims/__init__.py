"""Claims about normalization: data in `training.py` and `quick.py`, and one way to measure, judge and report them.

`claim.py` says what a claim is. `python ablate.py claim NAME` tests one and writes CLAIMS.md.
"""
