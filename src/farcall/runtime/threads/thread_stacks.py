"""The stacks of the threads of this process.

In Python 3.11 a garbage collection may start wherever an object is made, also in the middle of C,
and run Python code, and so give the GIL to another thread. Two things go wrong if that happens
while a thread looks at the frames of others:

- `sys._current_frames` takes a lock for the whole look, which threads need to begin and to end.
  Both wait forever then, and all other threads with them (CPython's issue 106883).
- `f_back` and `f_locals` read a frame for which they make an object first. The function of that
  frame may return meanwhile; its memory is freed, and the process ends by SIGSEGV.

So here no collection starts in the middle. Later Pythons collect between their instructions only.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

T = TypeVar("T")


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames`: by thread identifier, what each runs. From any thread.

    Keep neither the dict nor a frame of it in a variable: among the frames is the caller's own, so
    that would be a cycle, with all that the functions of all threads hold in it.
    """
    return _uncollected(sys._current_frames)


def caller_of(frame: FrameType) -> FrameType | None:
    """Return `frame.f_back`, of a function that may be running in another thread."""
    look: Callable[[], FrameType | None] = partial(getattr, frame, "f_back")
    return _uncollected(look)


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """Return `frame.f_locals`, of a function that may be running in another thread."""
    look: Callable[[], Mapping[str, Any]] = partial(getattr, frame, "f_locals")
    return _uncollected(look)


def _uncollected(call: Callable[[], T]) -> T:
    """Call something that is in C, while no garbage collection starts."""
    if sys.version_info >= (3, 12):
        return call()
    usual = gc.get_threshold()
    never, again = partial(gc.set_threshold, 0), partial(gc.set_threshold, *usual)
    calls: tuple[Callable[[], Any], ...] = (never, call, again)
    try:
        # In C from the first to the last, so that no other thread comes in between. The thresholds
        # and not `gc.disable`, which a program may be using just now.
        return cast(T, list(map(operator.call, calls))[1])
    except BaseException:
        gc.set_threshold(*usual)
        raise
