"""Reports of failures that pytest can't print, since a method of the exception raises.

Without them such an exception ends the whole run: Python 3.11 asks every exception that it prints
whether it is true, pytest prints those of other threads, too, with all that they were raised from,
and an error in a report is an internal error of pytest, at which pytest-xdist stops all workers.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

MOST = 8  # exceptions in a chain that are told of

_cause_of = vars(BaseException)["__cause__"].__get__
_context_of = vars(BaseException)["__context__"].__get__
_traceback_of = vars(BaseException)["__traceback__"].__get__


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    try:
        return (yield)
    except BaseException as failure:
        if call.excinfo is None:
            raise
        text = described(call.excinfo.value, failure)
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=text,
            when=call.when,
            duration=call.duration,
            start=call.start,
            stop=call.stop,
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """Let pytest hear of the errors of destructors that it can't print: in words of ours.

    Such an error may come while a hostile exception is handled, and has that one as its context.
    """
    report = sys.unraisablehook

    def reported(unraisable: Any) -> None:
        try:
            traceback.format_exception(unraisable.exc_value)
        except BaseException as failure:
            error = RuntimeError(described(unraisable.exc_value, failure))
            names = ("exc_type", "exc_traceback", "err_msg", "object")
            rest = {name: getattr(unraisable, name) for name in names}
            unraisable = SimpleNamespace(**rest | {"exc_type": RuntimeError}, exc_value=error)
        report(unraisable)

    sys.unraisablehook = reported


def described(error: BaseException, failure: BaseException) -> str:
    """Return the types and places of an exception and of those that it was raised from.

    Args:
        error: the exception; none of its methods is called.
        failure: the exception by which its report failed.
    """
    lines = [f"an exception that can't be printed, which raised {_name(failure)}:"]
    following: BaseException | None = error
    for _ in range(MOST):
        if following is None:
            break
        lines += [f"{_name(following)}, raised at", *_places(_traceback_of(following))]
        cause = _cause_of(following)
        following = _context_of(following) if cause is None else cause
    return "\n".join(lines)


def _name(error: BaseException) -> str:
    kind = type(error)
    own = vars(type)
    return f"{own['__module__'].__get__(kind)}.{own['__qualname__'].__get__(kind)}"


def _places(trace: TracebackType | None) -> list[str]:
    return [
        f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(trace)
    ]
