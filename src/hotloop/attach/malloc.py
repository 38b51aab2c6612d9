"""glibc's allocator returns large blocks to the system at once, and each page of them costs a fault when it is written
again: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_THRESHOLDS = ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")
_USUAL_MMAP_MAX = 65536
_MOST_ADAPTED_BYTES = 2**25
"""glibc raises its thresholds with the blocks that are freed, up to this one, until one of them is set: no call brings
that back. What a training has raised them to by then is taken to be this; with the values of the start each step might
fault in anew what it did not before.
"""
_KEPT_BYTES = 2**30
"""Free memory at the heap's end that is not returned to the system, nor mapped in again page by page in each step."""
KEEPING = f"MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_={_KEPT_BYTES}"
"""The same in a process's environment."""


def can_keep() -> bool:
    """Whether the C library has such settings, and whoever started the process has none of their own."""
    chosen = any(f"MALLOC_{name}_" in os.environ for name in _THRESHOLDS)
    return (
        platform.libc_ver()[0] == "glibc" and not chosen and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "")
    )


def keep_freed(on: bool) -> None:
    """Whether what this process frees from now on stays its own."""
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_MAX, 0 if on else _USUAL_MMAP_MAX)
    library.mallopt(_M_MMAP_THRESHOLD, _MOST_ADAPTED_BYTES)
    library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES if on else 2 * _MOST_ADAPTED_BYTES)
