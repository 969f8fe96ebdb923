"""Optional: generation in C on x86-64 CPUs. Without this package, everything runs, more slowly."""
