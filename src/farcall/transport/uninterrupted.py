"""What the main thread does so that Ctrl-C can't come in the middle of it.

Python runs the handlers of signals in the main thread, after calls and when functions begin. A
KeyboardInterrupt right after `lock.acquire` loses what it returned before anybody has noted it, and
the lock is held forever. A `for` statement calls its iterator and keeps what it got without a look
at signals in between; nor is there one when a function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from farcall.threads import FarcallThread

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


def in_a_thread(run: Callable[[], T], name: str) -> T:
    """Run a function in a thread of its own, and wait for it.

    A KeyboardInterrupt ends the wait. The function goes on to its end, and nobody gets what it
    gives or raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = FarcallThread(work, name)
    if thread.try_start() is None:
        thread.join()
    else:
        work()  # the system has no more threads: then Ctrl-C may cut it
    if errors:
        raise errors.pop()
    return results[0]
