"""What `rpc_async` returns."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall.runtime.context import CallContext, current

if TYPE_CHECKING:
    from farcall.runtime.executor import Executor

logger = logging.getLogger("farcall")

# How long a callback that is added to a future that is done waits for those before it, in seconds.
# No longer: they may wait for what its thread does next.
STAND_BACK = 0.1

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` that can be awaited, and that lets no error disappear.

    - `await future` works in any asyncio loop; cancelling the task does not cancel the call.
    - `then` gives another of these; an exception raised in the callback reaches whoever waits for
      the result as itself.
    - Callbacks run in the order in which they were added. One that is added when the future is just
      done, and another thread runs those before it, waits for them, 0.1 seconds at most.
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
    # Those that have not ended, in the order in which they were added.
    _callbacks: list[_Callback] | None = None
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
        if context is not None and context.gradients:
            callback = _in_context(callback, context)
        if self._callbacks is None:
            self._callbacks = []
        entry = _Callback(self, callback, self._callbacks)
        self._callbacks.append(entry)
        super().add_done_callback(entry)
        entry.added_by = 0

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not bridge.done():
                bridge.set_result(None)

        def on_done(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        # It stands back for no other callback: that would stop the loop.
        self._looked_at = True
        super().add_done_callback(on_done)
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


class _Callback:
    """A callback of a future, which keeps its place among the others.

    A thread that completes a future runs its callbacks in order. But as soon as the future is done,
    and that is before the first of them begins, torch runs one that is added there and then.
    """

    __slots__ = ("_callback", "_ended", "_future", "_others", "added_by", "run_by")

    def __init__(
        self, future: Future[Any], callback: Callable[[Any], None], others: list[_Callback]
    ) -> None:
        self._future = future
        self._callback = callback
        self._others = others
        self._ended = threading.Lock()  # released at the end
        self._ended.acquire()
        # Threads, or 0: which is about to add it, and which runs it.
        self.added_by = threading.get_ident()
        self.run_by = 0

    def __call__(self, _: object) -> None:
        me = threading.get_ident()
        if self.added_by == me:
            self._stand_back(me)
        self.run_by = me
        try:
            self._callback(self._future)
        finally:
            self._others.remove(self)
            self._ended.release()

    def _stand_back(self, me: int) -> None:
        """Wait for those before this, unless it is one of them that added it."""
        others = tuple(self._others)
        if any(other.run_by == me for other in others):
            return
        deadline = time.monotonic() + STAND_BACK
        for other in others[: others.index(self)]:
            if not other._ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return
            other._ended.release()


def _in_context(callback: Callable[[Any], None], context: CallContext) -> Callable[[Any], None]:
    """The callback in this context, and with the grad mode of now."""
    grad = torch.is_grad_enabled()

    def run(future: Any) -> None:
        token = current.set(context)
        try:
            with torch.set_grad_enabled(grad):
                callback(future)
        finally:
            current.reset(token)

    return run


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
