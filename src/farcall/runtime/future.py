"""What `rpc_async` returns."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Generator
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall.runtime.context import current

if TYPE_CHECKING:
    from farcall.runtime.executor import Executor

logger = logging.getLogger("farcall")

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` that can be awaited, and that lets no error disappear.

    - `await future` works in any asyncio loop; cancelling the task does not cancel the call.
    - `then` gives another of these; an exception raised in the callback reaches whoever waits for
      the result as itself.
    - A callback added inside an autograd context runs in that context and with the grad mode
      (`torch.no_grad`) of where it was added, whichever thread runs it.
    - A handler that waits for one does not count among the running handlers of its worker.
    - One that failed and is collected before anybody looked at it logs its error, with the place
      where it was made, to the logger "farcall".

    Thread-safe.
    """

    # The error, and the traceback that it had when it got here.
    _failed: tuple[BaseException, TracebackType | None] | None = None
    _orphan: _Orphan | None = None
    _looked_at = False
    # The user's code that made this, and the place in it, for the log.
    _made_by: CodeType | None = None
    _made_at = 0
    executor: Executor | None = None

    # Without the frames that the methods of torch.futures.Future cost.
    set_result = torch._C.Future.__dict__["set_result"]
    _wait = torch._C.Future.__dict__["wait"]

    def note_maker(self, frame: FrameType) -> None:
        """Remember this frame, or the nearest around it outside of farcall, as what made this."""
        # Not by `_is_farcall`: this is done for every call.
        while str(frame.f_globals.get("__name__"))[:8] == "farcall." and frame.f_back is not None:
            frame = frame.f_back
        self._made_by = frame.f_code
        self._made_at = frame.f_lasti

    def wait(self) -> T:
        self._looked_at = True
        executor = self.executor
        if executor is not None and executor.is_completing and not self.done():
            executor.let_complete()
        context = current.get()
        if context is None or self.done():
            return self._wait()  # type: ignore[no-any-return]
        with context.agent.executor.waiting():
            return self._wait()  # type: ignore[no-any-return]

    def value(self) -> T:
        self._looked_at = True
        return super().value()

    def exception(self) -> BaseException | None:
        """The error of a future that is done, or None. Looking at it counts as handling it."""
        self._looked_at = True
        return None if self._failed is None else self._failed[0]

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        result.__traceback__ = _without_farcall(result.__traceback__)
        self._failed = (result, result.__traceback__)
        self._orphan = orphan = _Orphan(self, result)
        # Like the base class, which insists on Exception: a remote SystemExit has to arrive, too.
        self._set_unwrap_func(orphan.throw)
        self.set_result(None)

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        _check_callback(callback)
        result: Future[S] = Future()
        result.note_maker(sys._getframe(1))

        def run(_: object) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        self.add_done_callback(run)
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        _check_callback(callback)
        self._looked_at = True
        context = current.get()
        if context is None or not context.gradients:
            super().add_done_callback(lambda _: callback(self))
            return
        grad = torch.is_grad_enabled()

        def run(_: object) -> None:
            token = current.set(context)
            try:
                with torch.set_grad_enabled(grad):
                    callback(self)
            finally:
                current.reset(token)

        super().add_done_callback(run)

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

    def __del__(self) -> None:
        if self._failed is not None and self._orphan is not None and not self._looked_at:
            self._orphan.adopt(self._failed[0])


class FutureOfCall(Future[T]):
    """The future of a call. It is made in half the time: from a tuple of devices."""

    __init__ = torch._C.Future.__dict__["__init__"]

    # Of the leader that completes it.
    executor: Executor


class _Orphan:
    """What the C++ half of a failed future has of the error.

    `collect_all` works on the C++ half alone, also when the Python half is gone. But the error must
    not be kept there, where the garbage collector can't see it: an error that was raised leads back
    to its future (traceback, frame, local variable), and both would stay for ever. So the Python
    half has it; only when that is collected and nobody has looked, the error moves here, without
    its traceback. If nobody looks here either, it is logged.
    """

    __slots__ = ("_error", "_future", "_made_at", "_made_by", "_summary", "_text")

    def __init__(self, future: Future[Any], error: BaseException) -> None:
        self._future = weakref.ref(future)
        self._error: BaseException | None = None
        self._summary = f"{type(error).__name__}: {error}"
        self._text = ""
        self._made_by = future._made_by
        self._made_at = future._made_at

    def adopt(self, error: BaseException) -> None:
        """The Python half is about to go."""
        self._text = "".join(traceback.format_exception(error))
        self._error = error.with_traceback(None)

    def throw(self, _: object) -> Any:
        """Raise the error; the future's unwrap function."""
        future = self._future()
        if future is not None and future._failed is not None:
            future._looked_at = True
            error, where = future._failed
            # Several futures may share one error: tracebacks of other raises don't belong to it.
            raise error.with_traceback(where)
        orphaned, self._error = self._error, None
        raise RuntimeError(self._summary) if orphaned is None else orphaned

    def __del__(self) -> None:
        if self._error is None:
            return
        where = ""
        code = self._made_by
        if code is not None:
            where = f" made at {code.co_filename}:{_line(code, self._made_at)} in {code.co_name}"
        logger.error("the failure of a call%s was never looked at:\n%s", where, self._text)


def _without_farcall(trace: TracebackType | None) -> TracebackType | None:
    """Without the outermost frames that are farcall's: they tell users nothing."""
    while trace is not None and _is_farcall(trace.tb_frame.f_globals):
        trace = trace.tb_next
    return trace


def _is_farcall(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__", "")).startswith("farcall.")


def _check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(
            "incompatible function arguments: the callback must be callable, not "
            f"{type(callback).__name__}"
        )


def _line(code: CodeType, instruction: int) -> int:
    """The number of the line that an instruction, by its offset in bytes, is part of."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
