"""Ablations and benchmarks: what the commands `ablate.py` and `bench.py` run."""
