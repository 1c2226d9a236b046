"""Loggers that can't disturb what they tell of.

A program may attach what it likes to the logger "farcall", or to the root: handlers, filters.
farcall writes to it while it ends a call, answers one, or takes a peer off its books. An
error of a handler there would leave that undone; and a handler that makes a call, or waits for one,
could wait for the very thread that it keeps. So:

- A thread of farcall's hands its records to a thread for handlers (`_Relay`), and waits for that
  one, so that a line is there before what comes after it, but only for a moment.
- In the middle of what others wait for, such as a link that is being made, records are kept until
  that is over (`records_later`). No thread logs while it holds a lock.
- A record that a thread logs inside a handler is dropped: it would lead to the handler again. So do
  the loggers of Python since 3.13.

See docs/decisions/0050-handlers-that-call.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context

from farcall.threads import FarcallThread, is_farcall_thread, is_main_thread

# The time that a thread of farcall's waits for a handler, in seconds. No longer: the handler may
# wait for what the thread does next.
STAND_BACK = 0.2
LONGEST_STAND_BACK = 1.0  # for several handlers, one after the other
MOST_LINES = 1000  # that wait for handlers

Handle = Callable[[logging.LogRecord], object]


class _LogState(threading.local):
    """The calling thread."""

    handles = False  # it is in a handler
    is_relay = False
    kept: list[tuple[_Guarded, logging.LogRecord]] | None = None  # see `records_later`


_here = _LogState()


class _Guarded:
    """`Logger.handle` of one logger, which raises nothing but what Ctrl-C does."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self, record: logging.LogRecord) -> None:
        if _here.handles:
            return
        if _here.kept is not None:
            _here.kept.append((self, record))
        elif is_farcall_thread():
            _relay.hand_over(self._handle, record)
        else:
            _give(self._handle, record)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name; from now on its methods raise nothing.

    Errors of its handlers and filters are shown on stderr, if `logging.raiseExceptions` is set.
    Thread-safe.
    """
    logger = logging.getLogger(name)
    if type(logger.handle) is not _Guarded:
        logger.__dict__["handle"] = _Guarded(logger.handle)
    return logger


@contextlib.contextmanager
def records_later() -> Iterator[None]:
    """Keep what this thread logs in the block from handlers until its end."""
    if _here.kept is not None:
        yield
        return
    kept = _here.kept = []
    try:
        yield
    finally:
        _here.kept = None
        for guarded, record in kept:
            guarded(record)


def _give(handle: Handle, record: logging.LogRecord) -> None:
    _here.handles = True
    try:
        handle(record)
    except BaseException as error:
        if type(error) is KeyboardInterrupt and is_main_thread():
            raise
        _report(error)
    finally:
        _here.handles = False


class _Delivery:
    """A record on its way to handlers, which see the context variables of its place."""

    def __init__(self, handle: Handle, record: logging.LogRecord) -> None:
        self._handle = handle
        self._record = record
        self._context = copy_context()
        self._ended = threading.Lock()  # released at the end
        self._ended.acquire()

    def give(self) -> None:
        try:
            self._context.run(_give, self._handle, self._record)
        finally:
            self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Wait for the handlers; return whether they have ended."""
        return self._ended.acquire(timeout=seconds)


class _Relay:
    """Gives records to their handlers, one after the other, in a thread that ends with the last.

    The process has one, as it has one tree of loggers. Thread-safe, also in finalizers: a thread
    that holds the lock may come here again.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have no thread and no lines: in a process that was forked."""
        self._lock = threading.RLock()  # guards what follows
        self._lines: deque[_Delivery] = deque()
        self._runs = False
        self._began = 0.0  # when handlers got the line that they have now; 0: they have none

    def hand_over(self, handle: Handle, record: logging.LogRecord) -> None:
        """Have handlers get a record, and wait for that, but no longer than for a moment.

        It is dropped if very many wait already: handlers make more lines than they take.
        """
        line = _Delivery(handle, record)
        with self._lock:
            if len(self._lines) >= MOST_LINES:
                return
            self._lines.append(line)
            if not self._runs:
                self._runs = FarcallThread(self._run, "farcall-log").try_start() is None
            runs = self._runs
            if not runs:
                self._lines.remove(line)
        if not runs:
            line.give()
        elif not _here.is_relay:
            self._stand_back(line)

    def _stand_back(self, line: _Delivery) -> None:
        now = time.monotonic()
        until = now + LONGEST_STAND_BACK
        while (left := min(until, (self._began or now) + STAND_BACK) - now) > 0:
            if line.wait(left):
                return
            now = time.monotonic()

    def _run(self) -> None:
        _here.is_relay = True
        while True:
            with self._lock:
                if not self._lines:
                    self._runs = False
                    return
                line = self._lines.popleft()
            self._began = time.monotonic()
            line.give()
            self._began = 0.0
            del line  # with the frames of an error


_relay = _Relay()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_relay.begin_anew)


def _report(error: BaseException) -> None:
    if not logging.raiseExceptions or sys.stderr is None:
        return
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        sys.stderr.write(f"--- a handler of farcall's log raised ---\n{''.join(lines)}")
    except BaseException:
        pass  # there is nowhere else to say it
