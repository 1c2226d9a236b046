"""The end of a program while threads of farcall still run: it ends with its own exit code.

Python does not wait for daemon threads. When it has ended, one that comes back from C++ is torn
down by `pthread_exit`, and C++ answers with `abort`: exit code 134. See
docs/decisions/end-of-program.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from farcall.runtime.frames import current_frames
from farcall.runtime.inbound import Job
from farcall.runtime.peers import readable
from farcall.threads import FarcallThread

if TYPE_CHECKING:
    from farcall._native import park_dying_threads, skip_static_destructors
else:
    try:
        from farcall._native import park_dying_threads, skip_static_destructors
    except ImportError:
        park_dying_threads = skip_static_destructors = None

logger = logging.getLogger("farcall")

GUARD_SECONDS = 60  # without the compiled part: how long an `abort` of the main thread may hang


def keep_exit_code() -> None:
    """See to it that the program ends with its own exit code. Called once, when it ends.

    Logs what threads of farcall still do.
    """
    if threading.active_count() == 1:
        return
    left = [thread for thread in threading.enumerate() if isinstance(thread, FarcallThread)]
    for what in running_functions(left):
        logger.warning("the program ends while %s is still running", what)
    if sys.platform != "linux":
        return
    if park_dying_threads is None:
        if left:
            _keep_by_ctypes()
        return
    park_dying_threads()
    if left:
        skip_static_destructors()


def running_functions(threads: list[FarcallThread]) -> list[str]:
    """What these threads do for the user, in words."""
    found = [thread.what for thread in threads if thread.what]
    of_agents = {thread.ident for thread in threads if not thread.what}
    for ident, frame in current_frames().items():
        if ident in of_agents:
            what = _function_in(frame)
            if what:
                found.append(what)
    return found


def _function_in(innermost: FrameType) -> str:
    """The call that a thread serves, and where it is now."""
    frame: FrameType | None = innermost
    where = innermost
    while frame is not None:
        if frame.f_code is _SERVES:
            job = frame.f_locals.get("self")
            name = readable(job.request.function) if isinstance(job, Job) else "a function"
            caller = f", called by {job.peer.name!r}" if isinstance(job, Job) else ""
            return f"{name} ({where.f_code.co_filename}:{where.f_lineno}{caller})"
        frame = frame.f_back
    return ""


_SERVES: CodeType = Job.run.__code__


def _keep_by_ctypes() -> None:
    """Like the compiled functions, but an `abort` of the main thread waits until an alarm ends it.

    `pause` and `_exit` of C take the place of functions of our own, since no Python may run there.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        on_exit, pause = libc.on_exit, ctypes.cast(libc.pause, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GUARD_SECONDS)
        libc.signal(int(signal.SIGABRT), pause)
        on_exit(libc._exit, None)
