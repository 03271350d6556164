"""How this process gets its memory from the system."""

import ctypes

# glibc's names and numbers, from malloc.h; it takes no larger threshold than this one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024**2
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep what one step frees for the next, which asks for the same again.

    glibc hands large blocks back to the system at once, and getting them anew costs a page fault every 4 KiB. This
    holds for the whole process; where there is no glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def give_back_freed_memory() -> None:
    """Hand the system what was needed on the way only, such as to load a model."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
