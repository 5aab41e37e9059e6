"""Most of what a large array costs on a CPU is the memory it is written into: whether that was used before."""

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Has the process keep the memory of freed arrays for the next ones, instead of giving it back to the system.

    glibc maps every large array afresh and unmaps it when it is freed; the page faults of a fresh map take longer than
    an elementwise operation itself. XLA's arrays of up to 64 MiB are then several times as fast to make. In exchange
    the process holds on to the most memory that it ever used. This is for the whole process and until it ends.

    Returns:
      Whether it was done: ``False`` where the C library is not glibc, and nothing changed.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  raises where it is another library
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):  # a TypeError on Windows
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
