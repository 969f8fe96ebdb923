"""Published claims about normalization: data in `trained.py` and `initial.py`, and one way to measure, judge and show.

`claim.py` says what a claim is. `python ablate.py claim NAME` tests one and writes CLAIMS.md and claims.html.
"""
