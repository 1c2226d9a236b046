"""Isolation of functions: a setting of one in its thread is not seen by the next.

The threads of an agent serve one function after the other. Variables of `contextvars` (decimal
contexts and numpy's error state among them) are isolated by a context of its own for each function:
a copy of the one that the thread had before it ran any code of the user. State that torch and
Python keep with the thread itself (`thread_state`) is put back afterwards as it is in a new thread.

That happens after the answer was sent, so that no caller waits for it.

Code of the user runs elsewhere, too: finalizers, whenever Python collects something, handlers of
loggers. State that these leave in a thread is found when the next function begins there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from farcall.runtime.context import current_context, set_context
from farcall.runtime.threads.thread_state import Restorer

T = TypeVar("T")


class Isolation:
    """Of one thread of an agent, which makes it and alone uses it.

    One call of C++ runs a function so that it leaves no traces in the thread. A method around it
    would cost each call of each user:

        isolation.state.run(isolation.context, function, isolation.put_back)

    The function runs in a context of its own: the variables that it sets are gone afterwards.

    Attributes:
        context: of the thread before it ran any function. Only copies of it are entered.
        state: what torch and Python keep with the thread.
        put_back: puts all of that back to what a new thread has. Never raises.
    """

    __slots__ = ("context", "put_back", "put_back_anomaly_mode", "state")

    def __init__(self, floats: int) -> None:
        restorer = Restorer(floats)
        self.state = restorer.state
        self.put_back = restorer.put_back
        self.put_back_anomaly_mode = restorer.put_back_anomaly_mode
        self.context = copy_context()


class _Thread(threading.local):
    isolation: Isolation | None = None  # of the calling thread, if it is an agent's


_thread = _Thread()


def isolate_thread(floats: int) -> Isolation:
    """Say that the calling thread is an agent's, and has not run any code of the user yet.

    Args:
        floats: `float_control` of the thread that has made the agent.
    """
    isolation = _thread.isolation = Isolation(floats)
    return isolation


def call_isolated(function: Callable[[], T]) -> T:
    """Return what a function returns that may run code of the user: a callback, unpickling.

    In a thread of an agent it is isolated, unless it is part of what the thread runs anyway. It
    finds the same call, and thus the same agent, as the code that calls this.
    """
    isolation = _thread.isolation
    if isolation is None or isolation.state.is_inside:
        return function()
    context = isolation.context.copy()
    context.run(set_context, current_context())
    return isolation.state.run(context, function, isolation.put_back)


def clean_thread() -> None:
    """Clean the thread before code of farcall's own makes tensors and runs no code of the user."""
    isolation = _thread.isolation
    if isolation is not None and not isolation.state.is_inside and isolation.state.begin():
        isolation.put_back()


@contextmanager
def between_functions() -> Iterator[None]:
    """Wrap isolated code of farcall's own: each function that it calls is isolated by itself."""
    isolation = _thread.isolation
    if isolation is None:
        yield
        return
    was_inside, isolation.state.is_inside = isolation.state.is_inside, False
    try:
        yield
    finally:
        isolation.state.is_inside = was_inside


def put_back_anomaly_mode() -> None:
    """Turn anomaly mode off if it was off when the function in this thread began.

    It is the process's, so the next function may see it as soon as the answer is sent.
    """
    isolation = _thread.isolation
    if isolation is not None:
        isolation.put_back_anomaly_mode()
