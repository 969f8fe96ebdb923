"""Norms for networks other than LLaMA: for images, in an RNN, in an MLP."""
