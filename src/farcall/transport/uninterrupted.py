"""Work that the main thread does so that Ctrl-C can't come in the middle of it.

Python runs the handlers of signals in the main thread, after calls and when functions begin. A
KeyboardInterrupt right after `lock.acquire` loses what it returned before anybody has noted it, and
the lock is held forever. A `for` statement calls its iterator and keeps what it got without a look
at signals in between; nor is there one when a function returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from farcall.errors import FarcallError
from farcall.threads import FarcallThread, is_main_thread

T = TypeVar("T")


class Lock(Protocol):
    """Of `threading`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...


def take(lock: Lock, timeout: float = 0.0) -> bool:
    """Acquire a lock that the caller releases in a `finally` that it is in already.

    Args:
        timeout: seconds to wait for it.

    Returns:
        Whether the caller has the lock now. If this raises, it has not.
    """
    how = (False,) if timeout <= 0 else (True, timeout)
    for is_taken in iter(partial(lock.acquire, *how), None):
        return is_taken
    raise AssertionError("acquire gives no None")


def uninterrupted(run: Callable[[], T], name: str) -> T:
    """Run a function so that Ctrl-C can't come in the middle: in the main thread, by another one.

    Ctrl-C ends the wait for it then. Locks that the caller holds are not the function's.

    Args:
        name: of the other thread.
    """
    return in_a_thread(run, name) if is_main_thread() else run()


def in_a_thread(
    run: Callable[[], T],
    name: str,
    seconds: float = threading.TIMEOUT_MAX,
    late: Exception | None = None,
    what: str = "",
) -> T:
    """Run a function in a daemon thread of its own, and wait for it.

    A KeyboardInterrupt ends the wait. The function goes on to its end, and its result is dropped.

    Args:
        name: of the thread.
        seconds: how long to wait at most.
        late: raised when that time is over. The thread is left behind.
        what: see `FarcallThread`.

    Raises:
        FarcallError: the system has no thread for a function whose time is limited.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = FarcallThread(work, name, what)
    refused = thread.try_start()
    if refused is None:
        thread.join(seconds)
    elif late is None:
        work()  # Ctrl-C may cut it then
    else:
        raise FarcallError(f"no thread for {what or name}: {refused}")
    if errors:
        raise errors.pop()
    if not results:
        raise late or TimeoutError(f"the thread {name!r} has not ended")
    return results[0]
