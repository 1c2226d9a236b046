"""Calls that are made again when a worker is lost: `retry=`, for functions that may run twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch

from farcall.errors import CallError, OwnerDied, PeerLost, UnknownWorker
from farcall.log import get_logger
from farcall.plain import whole_number
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.context import current_context, waiting
from farcall.runtime.options.timeouts import validate_timeout

logger = get_logger("farcall")

LONGEST_PAUSE = 10.0  # seconds


@dataclass(frozen=True)
class Retry:
    """The times and delays with which a call that is safe to repeat is made again.

    Args:
        times: how often at most, after the first attempt.
        backoff: seconds before the second attempt; twice that before the third, and so on, up to 10
            seconds.

    Raises:
        ValueError, TypeError: these make no sense.
    """

    times: int = 3
    backoff: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", whole_number("times of retry", self.times, 0))
        validate_timeout(self.backoff)

    @classmethod
    def of(cls, given: object) -> Retry:
        """Return what a user has given: one of these, or how often."""
        if isinstance(given, Retry):
            return given
        try:
            return cls(whole_number("retry", given))
        except TypeError as error:
            raise TypeError(f"{error}; it may be a Retry too") from None

    def pause(self, attempts: int) -> float:
        """Return the seconds to wait after so many attempts."""
        return float(min(LONGEST_PAUSE, self.backoff * 2 ** min(attempts - 1, 64)))


class Attempts:
    """The attempts of one call: whether there is another one.

    Args:
        what: is called, for the log.
        seconds: for all attempts and pauses together; 0 for no limit, None for the default.
    """

    def __init__(self, agent: Agent, what: str, retry: Retry, seconds: float | None) -> None:
        self._agent = agent
        self._what = what
        self._retry = retry
        self._deadline, *_ = agent.limits.of_call(seconds)
        self.count = 0

    @classmethod
    def of_call(
        cls, agent: Agent, func: object, to: object, retry: object, seconds: float | None
    ) -> Self:
        """Return the attempts of a call of a function on a worker, with `retry=` as it was given.

        Raises:
            TypeError, ValueError: `retry` makes no sense.
        """
        what = f"{getattr(func, '__qualname__', func)!r} on {to!r}"
        return cls(agent, what, Retry.of(retry), seconds)

    def left(self) -> float:
        """Begin an attempt; return the seconds that it has, or 0 for no limit."""
        self.count += 1
        left = self._deadline - time.monotonic()
        return 0.0 if left == float("inf") else max(left, 1e-3)

    def pause(self, error: BaseException) -> float | None:
        """Return how long to wait before the next attempt, or None if there is none.

        Only a call that a lost worker ends is tried again, or the lack of one in a group whose
        workers come and go. An error of the function is the outcome of the call, and so is the end
        of an object that no supervisor makes again.
        """
        agent, pause = self._agent, self._retry.pause(self.count)
        worker_is_gone = isinstance(error, PeerLost) or (
            isinstance(error, UnknownWorker) and agent.directory.can_ask(agent.me.name)
        )
        worker_is_gone &= not (isinstance(error, OwnerDied) and error.given_up)
        is_over = self.count > self._retry.times or time.monotonic() + pause >= self._deadline
        if not worker_is_gone or is_over or agent.status.is_closed:
            return None
        logger.warning(
            "%s: calls %s again in %g s, attempt %d of %d: %s",
            *(agent.me.name, self._what, pause, self.count + 1, self._retry.times + 1, error),
        )
        return pause

    def told(self, error: BaseException) -> BaseException:
        """Have the last error say how many attempts there were."""
        if self.count > 1 and isinstance(error, CallError | UnknownWorker):
            text = f"; the call was made {self.count} times"
            if isinstance(error, PeerLost):
                error.cause += text
                error.args = (error.worker, error.cause)
            else:
                error.args = (f"{error}{text}", *error.args[1:])
        return error


def call(attempts: Attempts, make: Callable[[float], Any]) -> Any:
    """Make a call until it has an outcome; return that.

    Args:
        make: makes the call, with a timeout in seconds.
    """
    while True:
        try:
            return make(attempts.left())
        except Exception as error:
            pause = attempts.pause(error)
            if pause is None:
                attempts.told(error)
                raise
        _rest(pause)


def _rest(seconds: float) -> None:
    context = current_context()
    served = None if context is None else context.served
    stopped = threading.Event()
    with waiting(), nullcontext() if served is None else served.stopped_by(stopped.set):
        stopped.wait(seconds)


class RepeatedCall(Future[Any]):
    """The future of a call that may be made again. See `call_async`."""

    attempts: Attempts
    make: Callable[[float], Future[Any]]
    later: Callable[[Callable[[], None], float], None]

    def begin(self) -> None:
        """Make an attempt, which is `call` from then on."""
        if self.done():
            return  # it was cancelled
        try:
            attempt = self.make(self.attempts.left())
        except Exception as error:
            attempt = Future()
            attempt.set_exception(error)
        self.call = attempt
        if self.done():  # it was cancelled just now
            attempt.cancel()
        attempt.add_done_callback(self._ended)

    def _ended(self, attempt: torch.futures.Future[Any]) -> None:
        try:
            value = attempt.value()
        except BaseException as error:
            pause = self.attempts.pause(error)
            if pause is None:
                complete_with(self, self.attempts.told(error))
            else:
                self.later(self.begin, pause)
            return
        if not self.done():
            self.set_result(value)


def call_async(
    agent: Agent, attempts: Attempts, make: Callable[[float], Future[Any]], maker: FrameType
) -> Future[Any]:
    """Return a future of a call that is made until it has an outcome.

    Args:
        make: makes the call, with a timeout in seconds.
        maker: the frame that makes the call, for the log.
    """
    future = RepeatedCall()
    future.note_maker(maker)
    future.attempts, future.make, future.later = attempts, make, agent.group.later.post
    future.begin()
    return future
