"""Optional C code for generation on x86-64 CPUs. Without this package, everything runs, and generates more slowly."""

from fast.decode import accelerate as accelerate
