"""A process that code of the user's has forked, and that comes back from that code.

In a thread of farcall's the code is a called function, a callback of a future, or a listener of
`on_join` and `on_leave`. The process has none of the agent's threads but the one that forked, and
no links: it can't go on with the work, which is its parent's. So it ends, as a program whose main
function returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from farcall.threads import is_farcall_thread

T = TypeVar("T")


def call_ending_forks(run: Callable[..., T], *args: Any) -> T:
    """Call a function of the user's; if this is a thread of farcall's, processes it forks end."""
    pid = os.getpid()
    try:
        return run(*args)
    finally:
        if os.getpid() != pid and is_farcall_thread():
            end_forked_process()


def end_forked_process() -> NoReturn:
    """End this process with the exit code that the exception in flight, if any, stands for."""
    error = sys.exception()
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
