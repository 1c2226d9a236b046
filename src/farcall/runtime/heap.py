"""Memory that was freed: this process's malloc keeps more of it.

An iteration of training frees tensors of tens of megabytes and asks for as many again. glibc's
malloc gives memory back to the system when 56 MB at the end of its heap are free, and whenever a
whole heap of a thread is. Each page that is taken again costs a fault and is cleared: 12,000 to
18,000 pages in an iteration of the benchmark `rnn_real`, 30 to 60 ms of 215. In a single process
something else mostly lies at the end of the heap; a worker may have nothing but such tensors.
"""

from __future__ import annotations

import ctypes
import os

# Of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# The most that glibc allows on 64 bits. Its own limit grows up to this as well when such a block is
# freed, but not any more once another limit was set.
_LARGEST_IN_HEAP = 32 * 1024 * 1024

_USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_ARENA_MAX",
)


def keep_freed_memory(size: int) -> bool:
    """Let malloc keep memory freed at the end of its heap, for the rest of the process.

    Threads that come later share one heap: what one has freed is of use to the others, and there is
    one limit and not one for each. Blocks of 32 MiB and more are the system's, as ever.

    Does nothing where the user has told malloc what to do (`MALLOC_*_` or `GLIBC_TUNABLES` in the
    environment), and where the C library is not glibc. Another malloc in its place does not mind.

    Args:
        size: up to how many bytes; 0 leaves everything as it is.

    Returns:
        Whether malloc was told.
    """
    if size == 0 or any(name in os.environ for name in _USER_SETTINGS):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    told = [
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP),
        mallopt(_M_TRIM_THRESHOLD, size),
        mallopt(_M_ARENA_MAX, 1),
    ]
    return told == [1, 1, 1]
