"""Optional code for faster generation: C on x86-64 CPUs, and torch.compile. Without this package, everything runs."""
