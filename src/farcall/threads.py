"""The threads that farcall starts, all by itself and all daemons."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

BUFFER_SIZE = 64  # bytes, twice what C's `struct _pthread_cleanup_buffer` has


class _ThreadKind(threading.local):
    """The calling thread: whether it is a `FarcallThread`."""

    is_farcalls = False


_here = _ThreadKind()


def is_farcall_thread() -> bool:
    """Return whether the calling thread is one that farcall has started."""
    return _here.is_farcalls


def is_main_thread() -> bool:
    """Return whether this is the thread that Ctrl-C interrupts."""
    return threading.get_ident() == threading.main_thread().ident


class FarcallThread(threading.Thread):
    """A daemon thread of farcall. It may outlive its agent, see `runtime.program_end`.

    Args:
        target: what the thread runs.
        name: says what the thread is for; see docs/threads.md.
        what: what to call the work of this thread, in the log, if the program ends meanwhile.
    """

    def __init__(self, target: Callable[[], None], name: str, what: str = "") -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.what = what

    def run(self) -> None:
        """Run the target. Called by `start`."""
        _here.is_farcalls = True
        with _parked_at_the_end():
            super().run()

    def try_start(self) -> str | None:
        """Start the thread. If that fails, it may be tried again.

        Returns:
            Why the system has no more threads; None if the thread was started.
        """
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            return f"{error or type(error).__name__} (a limit of processes, or of memory)"
        return None

    def join_if_started(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, if there is one to wait for."""
        if self.ident is not None and self is not threading.current_thread():
            self.join(timeout)


def _c_library() -> Any:
    """C's functions, if they have what `_parked_at_the_end` needs: those of glibc."""
    if sys.platform != "linux" or sys.version_info >= (3, 14):
        return None
    library: Any = ctypes.PyDLL(None)
    try:
        push, pop, allocate = (
            library._pthread_cleanup_push,
            library._pthread_cleanup_pop,
            library.malloc,
        )
    except AttributeError:
        return None
    allocate.restype = ctypes.c_void_p
    push.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    pop.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.free.argtypes = (ctypes.c_void_p,)
    return library


_c = _c_library()
_pause = None if _c is None else ctypes.cast(_c.pause, ctypes.c_void_p)


@contextlib.contextmanager
def _parked_at_the_end() -> Iterator[None]:
    """Let the calling thread sleep, and not be torn down, when Python has ended (before 3.14).

    Python calls C's `pthread_exit` in a daemon thread that comes back to it then. That unwinds the
    stack like an exception, and C++ code on it can't take that: it calls `abort`, or destructors
    use Python without its lock. Before anything is unwound, handlers run that were registered with
    the C function below and whose records are not on the stack. So one waits there, in `pause`.
    """
    if _c is None:
        yield
        return
    record = _c.malloc(BUFFER_SIZE)
    _c._pthread_cleanup_push(record, _pause, None)
    try:
        yield
    finally:
        _c._pthread_cleanup_pop(record, 0)
        _c.free(record)
