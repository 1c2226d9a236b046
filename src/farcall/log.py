"""Loggers that can't disturb what they tell of.

A program may attach what it likes to the logger "farcall": handlers, filters. farcall writes to it
while it ends a call, answers one, or takes a peer off its books, mostly in threads of its own. What
a handler raises there would leave that undone.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable

from farcall.threads import is_main_thread


class _Guarded:
    """`Logger.handle` of one logger, which raises nothing but what Ctrl-C does."""

    def __init__(self, handle: Callable[[logging.LogRecord], object]) -> None:
        self._handle = handle

    def __call__(self, record: logging.LogRecord) -> None:
        try:
            self._handle(record)
        except BaseException as error:
            if type(error) is KeyboardInterrupt and is_main_thread():
                raise
            _report(error)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name; from now on its methods raise nothing.

    What its handlers and filters raise is shown on stderr, if `logging.raiseExceptions` is set.
    Thread-safe.
    """
    logger = logging.getLogger(name)
    if type(logger.handle) is not _Guarded:
        logger.__dict__["handle"] = _Guarded(logger.handle)
    return logger


def _report(error: BaseException) -> None:
    if not logging.raiseExceptions or sys.stderr is None:
        return
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        sys.stderr.write(f"--- a handler of farcall's log raised ---\n{''.join(lines)}")
    except BaseException:
        pass  # there is nowhere else to say it
