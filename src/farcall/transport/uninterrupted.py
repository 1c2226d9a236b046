"""Work that the main thread does so that Ctrl-C can't come in the middle of it.

Python runs the handlers of signals in the main thread, after calls and when functions begin. A
KeyboardInterrupt right after `lock.acquire` loses what it returned before anybody has noted it, and
the lock is held forever. A `for` statement calls its iterator and keeps what it got without a look
at signals in between; nor is there one when a function returns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from farcall.errors import FarcallError
from farcall.threads import FarcallThread, is_main_thread

T = TypeVar("T")

REST_SECONDS = 2.0  # of a thread that takes steps for the main thread


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


class _ShortStep(Generic[T]):
    """A step that another thread takes for the main thread."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._ended = threading.Lock()  # released at the end
        self._ended.acquire()

    def take(self) -> None:
        try:
            self._results.append(self._run())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._ended.release()

    def result(self) -> T:
        """Wait for the end of the step; return its result, or raise its error."""
        self._ended.acquire()
        if self._errors:
            raise self._errors.pop()
        return self._results[0]


class ShortSteps:
    """Does what `uninterrupted` does, for steps that are short and come often.

    The other thread rests for a while when it has taken a step: to wake a thread costs a fifth of
    starting one. Ctrl-C may cut the main thread anywhere here, so it takes no lock.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: SimpleQueue[_ShortStep[Any]] = SimpleQueue()
        # The process in which a thread rests, or will look once more for a step; 0: none does. A
        # forked child has a copy, and no thread.
        self._rests_in = 0

    def take(self, run: Callable[[], T]) -> T:
        """Run a function, by another thread in the main thread's place; return its result."""
        if not is_main_thread():
            return run()
        step = _ShortStep(run)
        self._steps.put(step)
        # It rests no longer: perhaps it has the step already, and has not said so.
        rested_in, self._rests_in = self._rests_in, 0
        if rested_in != os.getpid():
            refused = FarcallThread(self._work, self._name).try_start()
            if refused is not None:
                self._take_all()  # Ctrl-C may cut it then
        return step.result()

    def _work(self) -> None:
        try:
            while True:
                self._take_all()
                self._rests_in = os.getpid()
                step = self._steps.get(timeout=REST_SECONDS)
                self._rests_in = 0
                step.take()
                del step  # a thread that rests keeps nothing alive
        except Empty:
            self._rests_in = 0
        self._take_all()  # one that came when it still rested

    def _take_all(self) -> None:
        try:
            while True:
                self._steps.get_nowait().take()
        except Empty:
            pass
