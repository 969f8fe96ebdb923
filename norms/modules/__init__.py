"""Norms for networks other than LLaMA: for images, in an RNN, in an MLP. And the scaled embedding of models without
statistics, which `--scaled-embedding` selects.
"""
