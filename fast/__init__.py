"""Optional code for speed: decoding in C on x86-64 CPUs, or compiled. Without this package, everything runs."""
