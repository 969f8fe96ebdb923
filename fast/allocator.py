"""The memory allocator of the C library."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # names of settings in glibc's malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next tensor. Returning it to the kernel and faulting it in again costs up to
    a fifth of a training step. Does nothing with other C libraries.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc and hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, -1)
