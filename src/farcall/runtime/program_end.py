"""The end of a program while threads of farcall still run: it ends with its own exit code.

Python does not wait for daemon threads. Two things can go wrong then, and each made the exit code
134 or 139: a thread comes back from C++ to a Python that has ended (`farcall.threads` has it sleep
then), and a thread computes in C++ while `exit` destroys static objects that it uses. `exit` does
not destroy any. See docs/decisions/0046-end-of-program.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from farcall.log import get_logger
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.threads.thread_stacks import caller_of, current_frames, variables_of
from farcall.threads import FarcallThread

logger = get_logger("farcall")


def keep_exit_code() -> None:
    """See to it that the program ends with its own exit code. Called once, when it ends.

    Logs what threads of farcall still do for the user.
    """
    left = [thread for thread in threading.enumerate() if isinstance(thread, FarcallThread)]
    if not left:
        return
    for what in works_of(left):
        logger.warning("the program ends while %s is still running", what)
    if sys.platform == "linux":
        _skip_static_destructors()


def works_of(threads: list[FarcallThread]) -> list[str]:
    """Return the work that these threads do for the user, in words."""
    found = [thread.what for thread in threads if thread.what]
    others = {thread.ident for thread in threads if not thread.what}
    for ident, frame in current_frames().items():
        what = _call_served(frame) if ident in others else ""
        if what:
            found.append(what)
    return found


def _call_served(innermost: FrameType) -> str:
    """Return the call that a thread serves, and where it is now; nothing, if it serves none."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code is not _SERVES:
        frame = caller_of(frame)
    call = None if frame is None else variables_of(frame).get("self")
    if not isinstance(call, ServerCall):
        return ""
    where = f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
    return f"{call.name} (at {where}, called by {call.peer.name!r})"


_SERVES: CodeType = ServerCall.run.__code__


def _skip_static_destructors() -> None:
    """Have C's `exit` end the process with its status at once, when it has written its files.

    The functions registered here are called with the status, the last one first.
    """
    library: Any = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        for function in (library._exit, library.fcloseall):
            library.on_exit(function, None)
