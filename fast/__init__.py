"""Optional code for speed: C on x86-64 CPUs, torch.compile, CUDA graphs. Without this package, everything runs."""
