"""What `rpc_async` returns."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Generator
from types import CodeType
from typing import Any, TypeVar

import torch

from farcall.runtime.context import current

logger = logging.getLogger("farcall")

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` that can be awaited, and that lets no error disappear.

    - `await future` works in any asyncio loop; cancelling the task does not cancel the call.
    - `then` gives another of these; an exception raised in the callback reaches whoever waits for
      the result as itself.
    - A handler that waits for one does not count among the running handlers of its worker.
    - One that failed and is collected before anybody looked at it logs its error, with the place
      where it was made, to the logger "farcall".

    Thread-safe.
    """

    _failure: BaseException | None = None
    _looked_at = False
    _made: tuple[CodeType, int] | None = None

    def note_maker(self) -> None:
        """Remember the user's line that made this future, for the log."""
        self._made = _user_line()

    def wait(self) -> T:
        self._looked_at = True
        context = current.get()
        if context is None or self.done():
            return super().wait()
        with context.agent.executor.waiting():
            return super().wait()

    def value(self) -> T:
        self._looked_at = True
        return super().value()

    def exception(self) -> BaseException | None:
        """The error of a future that is done, or None. Looking at it counts as handling it."""
        self._looked_at = True
        return self._failure

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        self._failure = result

        def fail(_: object) -> T:
            raise result

        # Like the base class, which insists on Exception: a remote SystemExit has to arrive, too.
        self._set_unwrap_func(fail)
        self.set_result(result)  # type: ignore[arg-type]

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        result: Future[S] = Future()
        result.note_maker()

        def run(_: object) -> None:
            try:
                result.set_result(callback(self))
            except BaseException as error:
                result.set_exception(error)

        self.add_done_callback(run)
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        self._looked_at = True
        super().add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not bridge.done():
                bridge.set_result(None)

        def on_done(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        yield from bridge
        return super().wait()

    def __del__(self) -> None:
        if self._failure is not None and not self._looked_at:
            where = ""
            if self._made is not None:
                code, line = self._made
                where = f" made at {code.co_filename}:{line} in {code.co_name}"
            logger.error(
                "the failure of a call%s was never looked at",
                where,
                exc_info=self._failure,
            )


def _user_line() -> tuple[CodeType, int] | None:
    """Code and line of the nearest frame outside of farcall: where a future was made."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("farcall."):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
