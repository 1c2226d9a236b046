"""The future that `rpc_async` returns."""

from __future__ import annotations

import asyncio
import sys
import traceback
import weakref
from collections.abc import Callable, Generator
from functools import partial
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch

from farcall.errors import Cancelled
from farcall.log import get_logger
from farcall.runtime.calls.callbacks import Callback, run_waiting_callbacks
from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.runtime.context import CallContext, current_context, reset_context, set_context
from farcall.runtime.threads.bell import Bell
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.forked import call_ending_forks
from farcall.serde import StoredError, hide_own_frames, message_of
from farcall.threads import is_main_thread
from farcall.torch_internals import Future as TorchFuture
from farcall.torch_internals import set_unwrap_func

logger = get_logger("farcall")

T = TypeVar("T")
S = TypeVar("S")

# The main thread looks so often, in seconds, whether the future that it waits for was completed
# past `Future.set_result`, or a signal was delivered to another thread of the process.
LOOK_AGAIN = 1.0


@methods_break_graphs
class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` that can be awaited, and that lets no error disappear.

    - `await future` works in any asyncio loop; cancelling the task that awaits cancels the future.
    - `cancel` ends the future of a call at once, and the work for the call elsewhere.
    - `then` gives another of these; an exception raised in the callback is raised by a wait for
      the result. The result completes whatever happens in the callback.
    - Callbacks run in the order in which they were added. A callback that is added while another
      thread still runs earlier ones waits for them, 0.1 seconds at most. Chains of callbacks may be
      of any length.
    - A callback added inside an autograd context runs in that context and with the grad mode
      (`torch.no_grad`) of the place where it was added, whichever thread runs it.
    - A handler that waits for a future does not count among the running handlers of its worker.
    - A failed future that is collected before its error was retrieved logs the error, with the
      place where the future was made, to the logger "farcall".
    - Each `wait` of a failed future raises a new exception, equal to the first, so that none keeps
      the frames of another alive.
    - Ctrl-C ends a `wait` of the main thread at once. The call goes on, and the future can be
      waited for again.

    Thread-safe.
    """

    _failed: StoredError | None = None
    _orphan: _Orphan | None = None
    _looked_at = False
    _is_cancelled = False
    # Those that have not ended, in the order in which they were added.
    _callbacks: list[Callback] | None = None
    # The user's code that made this, and the place in it, for the log.
    _made_by: CodeType | None = None
    _made_at = 0
    # Of the agent whose call, or calls, complete this; None for a future of the user's own.
    executor: Executor | None = None
    # The call that this future stands for, if it is not the call's own: it is cancelled with it.
    call: Future[Any] | None = None
    # The main thread sleeps at this bell, since torch's own wait does not look at signals. A thread
    # completes the future and then looks for a bell. The main thread first sets the bell and then
    # looks whether the future is done. So one sees the other. Where callbacks come before the end
    # of the completion, `_is_completing` says that it has begun, and the bell is looked for before.
    _bell: Bell | None = None
    _is_completing = False

    # Without the frames that the methods of torch.futures.Future cost.
    _set_result = TorchFuture.__dict__["set_result"]
    _wait = TorchFuture.__dict__["wait"]
    done = TorchFuture.__dict__["done"]

    def note_maker(self, frame: FrameType) -> None:
        """Remember this frame, or the nearest around it outside of farcall, as what made this."""
        # Not by `is_own`: this is done for every call.
        while str(frame.f_globals.get("__name__"))[:8] == "farcall." and frame.f_back is not None:
            frame = frame.f_back
        self._made_by = frame.f_code
        self._made_at = frame.f_lasti

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        elif self._failed is not None:
            state = f"failed with {self._failed.type_name}"
        else:
            state = "done"
        code = self._made_by
        where = "" if code is None else f" made at {_place(code, self._made_at)}"
        return f"<farcall Future {state}{where}>"

    def wait(self) -> T:
        self._looked_at = True
        try:
            return self._wait() if self.done() else self._wait_for_end()  # type: ignore[no-any-return]
        except BaseException as error:
            hide_own_frames(error)
            raise

    def _wait_for_end(self) -> Any:
        executor = self.executor
        if executor is not None:
            if executor.collecting.thread:
                executor.collecting.refuse("Future.wait")
            if executor.batch.is_on:
                executor.yield_to_batch()
                if self.done():
                    return self._wait()
        run_waiting_callbacks(self)
        wait = self._wait_interruptibly if is_main_thread() else self._wait
        context = current_context()
        if context is None:
            return wait()
        with context.agent.executor.waiting():
            return wait()

    def _refuse_in_a_fork(self, what: str) -> None:
        """Raise NotInitialized if this is pending in a process that nothing can complete it in."""
        executor = self.executor
        if executor is not None and executor.collecting.is_forked and not self.done():
            executor.collecting.refuse(what)

    def _wait_interruptibly(self) -> Any:
        """Wait in the main thread: a handler of a signal may run meanwhile, and raise."""
        bell = self._bell
        if bell is None:
            bell = self._bell = Bell()
        while not (self._is_completing or self.done() or bell.wait(LOOK_AGAIN)):
            pass
        return self._wait()

    def set_result(self, result: T) -> None:
        """Complete the future with a value.

        Raises:
            RuntimeError: the future is done already.
        """
        if not self._callbacks:
            self._set_result(result)
            if self._bell is not None:
                self._bell.ring()
            return
        # Torch runs the callbacks before it returns: the main thread need not wait for their end.
        self._is_completing = True
        if self._bell is not None:
            self._bell.ring()
        try:
            self._set_result(result)
        except BaseException:
            self._is_completing = self.done()
            raise

    def value(self) -> T:
        self._looked_at = True
        return super().value()

    def exception(self) -> BaseException | None:
        """Return the error of a future that is done, or None. The error then counts as handled."""
        self._looked_at = True
        return None if self._failed is None else self._failed.error()

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Complete the future with an error, which may be any exception.

        Its type, arguments and attributes are kept, and not the object itself.

        Raises:
            RuntimeError: the future is done already.
        """
        self._fail(StoredError(result))

    def _fail(self, stored: StoredError) -> None:
        orphan = _Orphan(self)
        if not self.done():
            self._failed, self._orphan = stored, orphan
            # Like the base class, which insists on Exception.
            set_unwrap_func(self)(orphan.throw)
        self.set_result(cast(T, None))

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        _check_callback(callback)
        result: Future[S] = Future()
        result.executor = self.executor
        result.note_maker(sys._getframe(1))

        def run(_: object) -> None:
            failure = None
            try:
                value = call_ending_forks(callback, self)
            except BaseException as error:
                failure = error
            if result._is_cancelled:
                return
            # Not in the handler: what further callbacks raise would have this error as its context.
            if failure is None:
                result.set_result(value)
            else:
                stored = StoredError(failure)
                del failure
                result._fail(stored)

        self._add(run, result)
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        _check_callback(callback)
        if getattr(callback, "__module__", None) == "asyncio.tasks":
            callback = _in_loop(callback)
        self._add(callback, None)

    def _add(self, callback: Callable[[Any], None], behind: Future[Any] | None) -> None:
        self._looked_at = True
        context = current_context()
        if context is not None and context.gradients:
            callback = _in_context(callback, context)
        if self._callbacks is None:
            self._callbacks = []
        entry = Callback(
            self,
            callback,
            self._callbacks,
            None if behind is None else partial(complete_with, behind),
        )
        self._callbacks.append(entry)
        super().add_done_callback(entry)
        entry.added_by = 0

    def remove_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> int:
        """Take back all additions of a callback that has not begun to run; return how many.

        This method of `asyncio.Future` lets `asyncio.wait` take futures of calls.
        """
        found = [one for one in self._callbacks or () if one.is_of(callback)]
        return sum(one.take_back() for one in found)

    def cancel(self) -> bool:
        """End the future now, in `Cancelled`. Thread-safe.

        If this is the future of a call, a call that waits, here or at the callee, is dropped; a
        running function sees the cancellation by `rpc.cancelled()`, and its calls are cancelled
        with it. For a future of `then` or of your own, only this future ends.

        Returns:
            False, without an effect, if the future is done.

        Raises:
            NotInitialized: this process was forked from the worker whose call it is.
        """
        if self.done():
            return False
        self._refuse_in_a_fork("Future.cancel")
        self._is_cancelled = True
        if not self._cancel():
            self._is_cancelled = False
            return False
        self._looked_at = True
        return True

    def _cancel(self) -> bool:
        complete_with(self, Cancelled("the future was cancelled"))
        if self.call is not None:
            self.call.cancel()
        return self._failed is not None

    def cancelled(self) -> bool:
        """Return whether `cancel` has ended the future."""
        return self._is_cancelled

    def __await__(self) -> Generator[Any, None, T]:
        self._refuse_in_a_fork("await")
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
        try:
            yield from bridge
        except asyncio.CancelledError:
            self.cancel()
            raise
        try:
            return self.value()
        except BaseException as error:
            hide_own_frames(error)
            raise

    def __del__(self) -> None:
        if self._failed is not None and self._orphan is not None:
            self._orphan.adopt(self._failed, self)


class FutureOfCall(Future[T]):
    """The future of a call. It is made in half the time: from a tuple of devices."""

    __init__ = TorchFuture.__dict__["__init__"]

    # Of the leader that completes it.
    executor: Executor
    made: Future[Any] | None = None  # of the call itself, if that was left until it could be made

    def _cancel(self) -> bool:
        if self.made is not None:
            return self.made.cancel()
        return bool(self.executor.handler.cancelling.call_of(self))


def complete_with(future: Future[Any], error: BaseException) -> None:
    """Fail a future unless it is done. Never raises."""
    if future.done():
        return
    try:
        future.set_exception(error)
    except BaseException:
        # The stack may be full. These are C functions, which need no frame of Python.
        if future.done():  # another thread was first
            return
        future._is_completing = True
        if future._bell is not None:
            future._bell.ring()
        set_unwrap_func(future)(partial(_throw, error))
        future._set_result(None)


def _throw(error: BaseException, _: object) -> NoReturn:
    raise error


def _in_context(callback: Callable[[Any], None], context: CallContext) -> Callable[[Any], None]:
    """Return the callback in this context, and with the grad mode of now."""
    grad = torch.is_grad_enabled()

    def run(future: Any) -> None:
        token = set_context(context)
        try:
            with torch.set_grad_enabled(grad):
                callback(future)
        finally:
            reset_context(token)

    return run


class _InLoop:
    """A callback of asyncio's own, which may run in the thread of its loop only."""

    __slots__ = ("_loop", "callback")

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self.callback = callback
        self._loop = asyncio.get_running_loop()

    def __call__(self, future: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.callback, future)


_in_loop = _InLoop


class _Orphan:
    """The error of a failed future, as its C++ half has it.

    `collect_all` works on the C++ half alone, also when the Python half is gone. But the error must
    not be kept there, where the garbage collector can't see it: its arguments may lead back to its
    future, and both would stay forever. So the Python half has it; only when that is collected the
    error moves here. If it was not retrieved when this is collected, too, it is logged.
    """

    __slots__ = ("_future", "_looked_at", "_made_at", "_made_by", "_stored")

    def __init__(self, future: Future[Any]) -> None:
        self._future = weakref.ref(future)
        self._stored: StoredError | None = None
        self._looked_at = False
        self._made_by = future._made_by
        self._made_at = future._made_at

    def adopt(self, stored: StoredError, future: Future[Any]) -> None:
        """Take over the error of a future whose Python half is about to go."""
        self._looked_at = future._looked_at
        self._stored = stored

    def throw(self, _: object) -> NoReturn:
        """Raise the error; the future's unwrap function."""
        future = self._future()
        if future is not None and future._failed is not None:
            future._looked_at = True
            raise future._failed.error()
        self._looked_at = True
        if self._stored is None:
            raise RuntimeError("the future of this error is being collected")
        raise self._stored.error()

    def __del__(self) -> None:
        if self._stored is None or self._looked_at:
            return
        code = self._made_by
        where = "" if code is None else f" made at {_place(code, self._made_at)} in {code.co_name}"
        error = self._stored.error()
        try:
            text = "".join(traceback.format_exception(error))
        except BaseException:
            text = message_of(error)
        logger.error("the failure of a call%s was never looked at:\n%s", where, text)


def _place(code: CodeType, instruction: int) -> str:
    return f"{code.co_filename}:{_line(code, instruction)}"


def _check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(
            "incompatible function arguments: the callback must be callable, not "
            f"{type(callback).__name__}"
        )


def _line(code: CodeType, instruction: int) -> int:
    """Return the number of the line that an instruction, by its offset in bytes, is part of."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
