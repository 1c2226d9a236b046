"""Tracebacks without the frames behind them, and without farcall's own frames.

A traceback keeps every frame that it shows, and each frame keeps its local variables. So nothing
that is stored or sent holds a traceback: it holds `Frames`, plain data from which tblib makes a
traceback that debuggers and editors show like any other. Stateless; safe from any thread.

farcall's own frames are left out everywhere, unless the environment says FARCALL_FULL_TRACEBACKS=1.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

import tblib

from farcall.errors import without_address

# File, function and line of each frame, outermost first.
Frames = list[tuple[str, str, int]]

# A traceback that is longer, by an endless recursion, keeps its two ends.
MAX_FRAMES = 100
MAX_NOTES = 1000  # of one exception in a text; a list that is longer keeps its two ends
MAX_LINE = 1 << 24
MAX_EARLIER = 8  # causes and contexts that are looked at
# Characters that a text of an exception, and a name in one, may have; the rest is left out. All
# texts of one failure together must stay far below what the metadata of a frame may take.
MAX_TEXT = 1 << 20
MAX_NAME = 1 << 10

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMOS = os.path.join(_PACKAGE, "demos", "")

# Past the properties that a user's type may have under these names.
traceback_of_exception = vars(BaseException)["__traceback__"].__get__
cause_of = vars(BaseException)["__cause__"].__get__
context_of = vars(BaseException)["__context__"].__get__


def shows_everything() -> bool:
    """Return whether the user wants to see farcall's own frames."""
    return os.environ.get("FARCALL_FULL_TRACEBACKS") == "1"


def is_own(file: str) -> bool:
    """Return whether a file is farcall's. The demos are programs of users."""
    return file.startswith(_PACKAGE) and not file.startswith(_DEMOS)


def frames_of(trace: TracebackType | None) -> Frames:
    """Return the frames of a traceback as plain data."""
    everything = shows_everything()
    lines = [
        (one.tb_frame.f_code, one.tb_lineno)
        for one in _links(trace)
        if everything or not is_own(one.tb_frame.f_code.co_filename)
    ]
    if len(lines) > MAX_FRAMES:
        lines[MAX_FRAMES // 2 : -(MAX_FRAMES // 2)] = []
    return [(_name(code.co_filename), _name(code.co_name), line) for code, line in lines]


def _name(text: str) -> str:
    """Return the name of a file or a function as text to be printed, and looked up as a file."""
    if type(text) is str and text.isascii() and len(text) <= MAX_NAME and "\0" not in text:
        return text  # as nearly all are, and a traceback has many
    name = encodable(clipped(text, MAX_NAME)).replace("\0", "\\x00")
    try:
        os.fsencode(name)
    except ValueError:  # not UTF-8: of an old locale
        return name.encode("ascii", "backslashreplace").decode()
    return name


def traceback_from(frames: Sequence[Any], *, reads_source: bool = True) -> TracebackType | None:
    """Return a traceback that shows these frames, or None if there are none.

    The frames may come from a peer: anything that is no frame is left out, and names that the file
    system refuses are escaped: Python opens the file when it prints the traceback.

    Args:
        frames: file, function and line of each, outermost first.
        reads_source: whether printing reads lines of code in these files. Without, names of files
            are shown as "<name>", which Python does not open.
    """
    made: TracebackType | None = None
    for frame in reversed(frames[:MAX_FRAMES]):
        with suppress(Exception):
            file, function, line = frame
            if 0 < line <= MAX_LINE:
                # Without an instruction: the statement that tblib runs has columns of its own, and
                # these would be marked in the user's line.
                file, function = _name(file), _name(function)
                if not reads_source and not (file[:1] == "<" and file[-1:] == ">"):
                    file = f"<{file}>"
                made = TracebackType(made, _frame(file, function, line), -1, line)
    return made


@lru_cache(256)  # the frames of one failure come again at each hop and each raise
def _frame(file: str, function: str, line: int) -> FrameType:
    """Return a frame without variables that shows this place."""
    code = SimpleNamespace(co_filename=file, co_name=function)
    namespace = {"__file__": file, "__name__": "?"}
    shown = SimpleNamespace(f_globals=namespace, f_locals={}, f_code=code, f_lineno=line)
    return next(_made_frames(SimpleNamespace(tb_frame=shown, tb_lineno=line, tb_next=None)))


def _made_frames(trace: Any) -> Iterator[FrameType]:
    """Yield the frame that tblib makes.

    The `f_back` of such a frame leads to all frames around it. In a generator they end here: the
    frame of a generator that is suspended has none around it.
    """
    yield tblib.Traceback(trace).as_traceback().tb_frame


def _links(trace: TracebackType | None) -> list[TracebackType]:
    links = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    return links


def hide_own_frames(error: BaseException) -> None:
    """Leave farcall's frames out of the traceback of an error that is being raised to the user.

    A function that calls this and then says `raise`, and nothing more, does not show up itself:
    Python notes a frame where an exception is raised or passes, not where it goes on.
    """
    if shows_everything():
        return
    following: BaseException | None = error
    for _ in range(MAX_EARLIER):
        if following is None:
            return
        made: TracebackType | None = None
        for one in reversed(_links(traceback_of_exception(following))):
            if not is_own(one.tb_frame.f_code.co_filename):
                made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
        BaseException.with_traceback(following, made)
        cause = cause_of(following)
        # Not by `or`, which asks the user's exception whether it is true.
        following = context_of(following) if cause is None else cause


def text_of(error: BaseException) -> str:
    """Return the traceback as text, with those of its causes and contexts, clipped. Never raises.

    Addresses of the troubleshooting page are left out: whatever shows this text has its own.

    Returns:
        Text of `MAX_TEXT` characters at most, and the mark that says how many were left out.
    """
    try:
        shown = traceback.TracebackException(type(error), error, traceback_of_exception(error))
        _hide(shown, frames=not shows_everything())
        text = "".join(shown.format())
    except BaseException as failure:
        return f"<formatting the traceback raised {type(failure).__name__}>\n"
    return encodable(clipped(text, MAX_TEXT))


def _hide(shown: traceback.TracebackException | None, *, frames: bool) -> None:
    while shown is not None:
        if frames:
            shown.stack[:] = [frame for frame in shown.stack if not is_own(frame.filename)]
        shown.__notes__ = without_address(_ends_of(shown.__notes__))
        for member in getattr(shown, "exceptions", None) or ():
            _hide(member, frames=frames)
        _hide(shown.__cause__, frames=frames)
        shown = shown.__context__


def _ends_of(notes: Any) -> Any:
    """Return as many notes of a list as a text may have; any other object as it is."""
    left_out = len(notes) - MAX_NOTES if type(notes) is list else 0
    if left_out <= 0:
        return notes
    end = MAX_NOTES // 2
    return [*notes[:end], f"... [{left_out} notes left out] ...", *notes[-end:]]


def clipped(text: str, limit: int) -> str:
    """Return the text, or its beginning and end with a mark that says how much was left out.

    Args:
        text: the text.
        limit: how many characters of it are kept.
    """
    if len(text) <= limit:
        return text
    end = limit // 2
    begin = limit - end
    left_out = f"... [{len(text) - limit} characters left out] ..."
    return f"{text[:begin]}{left_out}{text[len(text) - end :]}"


def encodable(text: str) -> str:
    """Return the text with what UTF-8 can't encode, as in odd file names, as escapes."""
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")
