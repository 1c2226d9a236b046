"""The threads of this process: their stacks, and the calls that they serve and wait for.

A thread's frames have the calls in their variables, so nothing need be written down for this while
calls are made.
"""

from __future__ import annotations

import asyncio
import linecache
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, MethodType
from typing import Any, NamedTuple

from farcall.runtime.calls.call_client import CallClient
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.inspection.reports import (
    CallReport,
    LoopReport,
    ThreadReport,
    WaitReport,
)
from farcall.runtime.membership.lookup import EVERYBODY, Lookup
from farcall.runtime.membership.roster import Roster
from farcall.runtime.threads.thread_stacks import caller_of, current_frames, variables_of
from farcall.serde import is_own

MOST_FRAMES = 100
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_SERVES = ServerCall.run.__code__
_CALLS = CallClient.call.__code__
_WAITS_FOR = Future.wait.__code__
_JOINS = Roster.wait_for.__code__
_ASKS = Lookup._answer_to.__code__
_LOOPS = asyncio.BaseEventLoop.__dict__["_run_once"].__code__  # one turn of an event loop
_CALLS_BACK = asyncio.Handle.__dict__["_run"].__code__


class Seen(NamedTuple):
    """A thread, when it was looked at.

    Attributes:
        serves: the call of which it runs the function, or None.
        waits_for: the call, or the future of the call, that it waits for, or None.
        awaits: what else it waits for, or None.
    """

    name: str
    id: int
    frames: list[FrameType]
    serves: ServerCall | None
    waits_for: object
    awaits: WaitReport | None

    @property
    def is_farcalls(self) -> bool:
        """Return whether farcall has started it."""
        return self.name.startswith("farcall-")


def look() -> list[Seen]:
    """Return all threads of Python but the one that calls this."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    me = threading.get_ident()
    seen = []
    for ident, frame in current_frames().items():
        if ident == me:
            continue
        thread = threads.get(ident)
        frames = list(_frames_of(frame))
        seen.append(
            Seen(
                "?" if thread is None else thread.name,
                0 if thread is None else thread.native_id or 0,
                frames,
                _innermost(frames, _SERVES, "self"),
                _innermost(frames, _CALLS, "pending")
                or _own_future(_innermost(frames, _WAITS_FOR, "self")),
                _awaited(frames),
            )
        )
    return seen


def _own_future(waited: object) -> object:
    """Return the call's own future for one that stands for it, of a call with `retry=`, say."""
    while isinstance(waited, Future):
        call = getattr(waited, "made", None) or waited.call
        if call is None:
            break
        waited = call
    return waited


def reports(seen: list[Seen], calls: Mapping[int, CallReport]) -> list[ThreadReport]:
    """Return what there is to say of threads, those that serve calls first.

    Args:
        calls: descriptions of calls, by the `id` of the objects in `Seen`.
    """
    made = [_report(one, calls) for one in seen if one.serves or not one.is_farcalls]
    return sorted(made, key=lambda one: (one.serves is None, one.waits_for is None, one.name))


def _report(seen: Seen, calls: Mapping[int, CallReport]) -> ThreadReport:
    shown = _users(seen.frames)
    return ThreadReport(
        seen.name,
        seen.id,
        [_text(one) for one in shown[:MOST_FRAMES]],
        _place(shown),
        calls.get(id(seen.serves)),
        calls.get(id(seen.waits_for)),
        seen.awaits,
        _loop(seen.frames),
    )


def _users(frames: list[FrameType]) -> list[FrameType]:
    """Return those of frames that are not farcall's own, or all."""
    return [one for one in frames if not is_own(one.f_code.co_filename)] or frames


def _place(frames: list[FrameType]) -> str:
    return _text(next((one for one in frames if not _is_library(one)), frames[0]))


def _loop(frames: list[FrameType]) -> LoopReport | None:
    """Return the event loop that a thread runs, if a coroutine or a callback has the thread."""
    codes = [one.f_code for one in frames]
    turn = codes.index(_LOOPS) if _LOOPS in codes else 0
    if not turn or codes[turn - 1] is not _CALLS_BACK:
        return None
    variables = variables_of(frames[turn])
    # A turn notes the time when it has looked for events, and then calls all that are ready.
    loop, looked = variables.get("self"), variables.get("end_time")
    if loop is None or looked is None:
        return None
    now = loop.time()
    due = [timer for timer in list(loop._scheduled) if timer.when() <= now]
    own = getattr(type(loop), "_read_from_self", None)  # it follows `call_soon_threadsafe`
    ready = sum(_is_users(handle, own) for handle in [*list(loop._ready), *due])
    within = frames[: turn - 1] or frames[:1]  # a function in C has no frame
    return LoopReport(_place(_users(within)), max(0.0, now - looked), ready)


def _is_users(handle: Any, own: object) -> bool:
    """Return whether a loop is to call something for a user, and not its own method `own`."""
    callback = handle._callback
    is_own_method = type(callback) is MethodType and callback.__func__ is own
    return not (handle.cancelled() or is_own_method)


def _frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = caller_of(frame)


def _awaited(frames: list[FrameType]) -> WaitReport | None:
    """Return what a thread waits for that is no call."""
    now = time.monotonic()
    missing = _innermost(frames, _JOINS, "missing")
    if missing:
        what = f"for {', '.join(missing)} to join (wait_for)"
        return WaitReport(what, now - _innermost(frames, _JOINS, "began"))
    question = _innermost(frames, _ASKS, "question")
    if question is None:
        return None
    who = "is there" if question.key == EVERYBODY else f"{question.key!r} is"
    what = f"for the store to say who {who}: the store does not answer"
    return WaitReport(what, now - question.began)


def _innermost(frames: list[FrameType], code: CodeType, variable: str) -> Any:
    """Return what the innermost frame of a function has in a variable."""
    for frame in frames:
        if frame.f_code is code:
            return variables_of(frame).get(variable)
    return None


def _text(frame: FrameType) -> str:
    code = frame.f_code
    # A frame has no line between two instructions that Python has put in itself.
    line = frame.f_lineno or code.co_firstlineno
    where = f"{code.co_filename}, line {line}, in {code.co_qualname}"
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"{where}: {source}" if source else where


def _is_library(frame: FrameType) -> bool:
    """Return whether a frame is of Python's own library, or of an installed one."""
    return frame.f_code.co_filename.startswith(("<", *_LIBRARIES))
