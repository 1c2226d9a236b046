"""Checks that a part of a test leaves no thread behind, in a process that has those of others.

A thread that has done its work is still listed for a moment, and its owner need not wait for that.
So threads are told by their identity, not by a name that other tests use, and may take their time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from patience import PATIENCE


@contextlib.contextmanager
def check_no_threads_left(prefix: str = "") -> Iterator[None]:
    """Fail if threads that begin in the block do not end.

    Args:
        prefix: of their names; others are not looked at.
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + PATIENCE
    for thread in threads_since(before, prefix):
        thread.join(max(0.0, deadline - time.monotonic()))
    assert [one.name for one in threads_since(before, prefix)] == []


def threads_since(before: set[threading.Thread], prefix: str = "") -> list[threading.Thread]:
    """Return the threads that were not there before and whose names begin so."""
    new = [one for one in threading.enumerate() if one not in before]
    return [one for one in new if one.name.startswith(prefix)]
