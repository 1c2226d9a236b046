"""The stacks of the threads of this process."""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames`: by thread identifier, what each runs. From any thread.

    Python 3.11 takes a lock for that which threads need to begin and to end. A garbage collection
    that starts meanwhile may run Python code, and so give the GIL to such a thread; both
    wait forever then, and everybody else with them (CPython's issue 106883). So here none starts
    meanwhile. Later Pythons collect between their instructions only.

    Keep neither the dict nor a frame of it in a variable: among the frames is the caller's own, so
    that would be a cycle, with all that the functions of all threads hold in it.
    """
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    usual = gc.get_threshold()
    never, again = partial(gc.set_threshold, 0), partial(gc.set_threshold, *usual)
    calls: tuple[Callable[[], Any], ...] = (never, sys._current_frames, again)
    try:
        # In C from the first to the last, so that no other thread comes in between. The thresholds
        # and not `gc.disable`, which a program may be using just now.
        return cast(dict[int, FrameType], list(map(operator.call, calls))[1])
    except BaseException:
        gc.set_threshold(*usual)
        raise
