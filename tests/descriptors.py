"""Checks that a part of a test leaves no descriptor open, in a process that has those of others.

Threads that earlier tests have left behind may open and close descriptors at any time. A number
that is too high at one moment says nothing; one that stays too high does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator

from patience import PATIENCE


@contextlib.contextmanager
def check_no_descriptors_left(turn: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Fail if the block leaves more descriptors open than there were.

    Args:
        turn: called before each count; does what closes those that are closed later.
    """
    gc.collect()  # descriptors of earlier tests' garbage would make up for some that are left
    before = open_descriptors()
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        turn()
        now = open_descriptors()
        if len(now) <= len(before):
            return
        new = [f"{fd} ({now[fd]})" for fd in now if before.get(fd) != now[fd]]
        assert time.monotonic() < deadline, f"left open: {', '.join(new)}"
        time.sleep(0.01)  # other threads close theirs, and nothing tells when


def open_descriptors() -> dict[int, str]:
    """Return the descriptors of this process, but for that of the listing, and what each is of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
