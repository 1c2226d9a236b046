"""What `rpc_async` returns."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Generator
from types import CodeType, TracebackType
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

    _failure: _Failure | None = None
    _error: BaseException | None = None  # once somebody looked at it; see `_Failure`
    _looked_at = False
    _made: tuple[CodeType, int] | None = None

    def note_maker(self) -> None:
        """Remember the user's line that made this future, for the log."""
        self._made = _user_line()

    def wait(self) -> T:
        context = current.get()
        try:
            if context is None or self.done():
                return super().wait()
            with context.agent.executor.waiting():
                return super().wait()
        finally:
            self._look()

    def value(self) -> T:
        try:
            return super().value()
        finally:
            self._look()

    def exception(self) -> BaseException | None:
        """The error of a future that is done, or None. Looking at it counts as handling it."""
        self._look()
        return self._error

    def _look(self) -> None:
        self._looked_at = True
        if self._failure is not None:
            self._failure.looked_at = True
            self._failure.move_to(self)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        failure = self._failure = _Failure(result, self._looked_at, self._made)
        # Like the base class, which insists on Exception: a remote SystemExit has to arrive, too.
        self._set_unwrap_func(failure.throw)
        self.set_result(None)  # type: ignore[arg-type]

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
        if self._failure is not None:
            self._failure.looked_at = True
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
        return self.value()


class _Failure:
    """The error of a future. It logs the error if nobody ever looked at it.

    The C++ half of a future, which `collect_all` and `wait_all` may use when the Python half is
    gone, has this, and the garbage collector can't see into C++. An error that was raised leads
    back to its future (traceback, frame, local variable): kept here it would be kept for ever. So
    it moves to the Python half when somebody looks at it there.
    """

    __slots__ = ("_error", "_home", "_made", "_text", "_traceback", "looked_at")

    def __init__(
        self, error: BaseException, looked_at: bool, made: tuple[CodeType, int] | None
    ) -> None:
        self.looked_at = looked_at
        self._error: BaseException | None = error
        self._traceback = error.__traceback__ = _without_farcall(error.__traceback__)
        self._text = f"{type(error).__name__}: {error}"
        self._made = made
        self._home: weakref.ref[Future[Any]] | None = None

    def move_to(self, future: Future[Any]) -> None:
        if self._error is not None:
            # In this order: `throw` may look at any moment.
            future._error = self._error
            self._home = weakref.ref(future)
            self._error = None

    def throw(self, _: object) -> Any:
        """Raise the error; the future's unwrap function."""
        self.looked_at = True
        error = self._error
        if error is None and self._home is not None:
            future = self._home()
            error = None if future is None else future._error
            del future
        if error is None:
            raise RuntimeError(self._text)
        # Several futures may share one error; tracebacks of earlier raises don't belong to this.
        raise error.with_traceback(self._traceback)

    def __del__(self) -> None:
        if self.looked_at:
            return
        where = ""
        if self._made is not None:
            code, line = self._made
            where = f" made at {code.co_filename}:{line} in {code.co_name}"
        logger.error("the failure of a call%s was never looked at", where, exc_info=self._error)


def _without_farcall(traceback: TracebackType | None) -> TracebackType | None:
    """Without the outermost frames that are farcall's: they tell users nothing."""
    while traceback is not None and _is_farcall(traceback.tb_frame.f_globals):
        traceback = traceback.tb_next
    return traceback


def _is_farcall(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__", "")).startswith("farcall.")


def _user_line() -> tuple[CodeType, int] | None:
    """Code and line of the nearest frame outside of farcall: where a future was made."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_farcall(frame.f_globals):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
