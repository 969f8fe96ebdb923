"""Directories that `transformers` can open, written and read: configuration, names of weights, files of weights."""
