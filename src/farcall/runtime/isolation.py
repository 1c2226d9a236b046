"""What one function sets in its thread, the next one must not see.

The threads of an agent serve one function after the other. Variables of `contextvars` (decimal
contexts and numpy's error state among them) are isolated by a context of its own for each function:
a copy of the one that the thread had before it ran any code of the user. What torch and Python keep
with the thread itself (`thread_state`) is put back afterwards as it is in a new thread.

That happens after the answer was sent, so that no caller waits for it.

Code of the user runs elsewhere, too: finalizers, whenever Python collects something, handlers of
loggers. What these leave in a thread is found when the next function begins there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import TypeVar

from farcall.runtime.context import current
from farcall.runtime.thread_state import Restorer, float_control

T = TypeVar("T")


class _Isolation:
    """Of one thread of an agent, which makes it.

    Attributes:
        context: of the thread before it ran any function. Only copies of it are entered.
        is_inside: a function runs in the thread.
    """

    __slots__ = ("_restorer", "_state", "context", "is_inside")

    def __init__(self, floats: int) -> None:
        self._restorer = Restorer(floats)
        self._state = self._restorer.state
        self.context = copy_context()
        self.is_inside = False

    def clean(self) -> None:
        """Put back what code has set that was not isolated."""
        if self._state.begin():
            self._restorer.put_back()

    def run(self, context: Context, function: Callable[[], T]) -> T:
        state = self._state
        if state.begin():  # `clean`, without a call
            self._restorer.put_back()
        was_inside, self.is_inside = self.is_inside, True
        try:
            return context.run(function)
        finally:
            self.is_inside = was_inside
            if state.has_changed():
                self._restorer.put_back()

    def put_back_anomaly_mode(self) -> None:
        self._restorer.put_back_anomaly_mode()


class _Thread(threading.local):
    isolation: _Isolation | None = None  # of the calling thread, if it is an agent's


_thread = _Thread()


def isolate_thread(floats: int) -> None:
    """Say that the calling thread is an agent's, and has not run any code of the user yet.

    Args:
        floats: `float_control` of the thread that has made the agent.
    """
    _thread.isolation = _Isolation(floats)


def run_isolated(function: Callable[[], None]) -> None:
    """Run a function in this thread, which is an agent's, so that it leaves no traces in it.

    It runs in a context of its own: the variables that it sets are gone afterwards.
    """
    isolation = _thread.isolation
    if isolation is None:
        isolation = _thread.isolation = _Isolation(float_control())
    isolation.run(isolation.context.copy(), function)


def call_isolated(function: Callable[[], T]) -> T:
    """Return what a function returns that may run code of the user: a callback, unpickling.

    In a thread of an agent it is isolated, unless it is part of what the thread runs anyway. It
    finds the same call, and thus the same agent, as the code that calls this.
    """
    isolation = _thread.isolation
    if isolation is None or isolation.is_inside:
        return function()
    context = isolation.context.copy()
    context.run(current.set, current.get())
    return isolation.run(context, function)


def clean_thread() -> None:
    """Before code of farcall's own that makes tensors and runs no code of the user."""
    isolation = _thread.isolation
    if isolation is not None and not isolation.is_inside:
        isolation.clean()


@contextmanager
def between_functions() -> Iterator[None]:
    """Around code of farcall's own in `run_isolated`: what it calls is isolated part by part."""
    isolation = _thread.isolation
    was_inside = isolation is not None and isolation.is_inside
    if isolation is not None:
        isolation.is_inside = False
    try:
        yield
    finally:
        if isolation is not None:
            isolation.is_inside = was_inside


def put_back_anomaly_mode() -> None:
    """Turn anomaly mode off if it was off when the function in this thread began.

    It is the process's, so the next function may see it as soon as the answer is sent.
    """
    isolation = _thread.isolation
    if isolation is not None:
        isolation.put_back_anomaly_mode()
