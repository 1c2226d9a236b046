"""KeyboardInterrupt at every point where Python looks at signals, one point after the other.

Those are where a function begins, after it has called a function of C, and where a loop begins
again. A trace function raises it there.
"""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest

needs_its_bytecode = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)), reason="knows their bytecode"
)
CALLS = ("CALL", "CALL_FUNCTION_EX")


@cache
def instructions(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


@cache
def handler_at(code: CodeType, offset: int) -> int | None:
    """Return the handler of an exception that is raised by the instruction at this offset."""
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            return int(entry.target)
    return None


class Interrupt:
    """Raises KeyboardInterrupt once, at the point of this number in farcall or `threading`."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self._before: dict[FrameType, int] = {}  # the offset of the last instruction
        self._has_returned = False  # from a function of Python: there is no look at signals

    def run(self, function: Callable[[], object]) -> bool:
        """Return whether it was raised by the function."""
        usual = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(usual)
            self._before.clear()
        return False

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if self.where or not ("/farcall/" in file or file == threading.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_step

    def _on_step(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.where:
            return None
        if event == "return":
            self._before.pop(frame, None)
            self._has_returned = True
        if event != "opcode":
            return self._on_step
        names = instructions(frame.f_code)
        now, last = names.get(frame.f_lasti, ""), self._before.get(frame, -1)
        before, self._before[frame] = names.get(last, ""), frame.f_lasti
        has_returned, self._has_returned = self._has_returned, False
        looks = now == "RESUME" or before == "JUMP_BACKWARD"
        # Python looks while it is still at the call. One step later another handler may be in
        # charge: a call at the end of a `with` block is inside, the next instruction is not.
        looks = looks or (
            before in CALLS
            and not has_returned
            and handler_at(frame.f_code, last) == handler_at(frame.f_code, frame.f_lasti)
        )
        if looks and not is_swallowed(frame):
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, {now}"
                signal.default_int_handler(signal.SIGINT, None)  # raises, as for a Ctrl-C
        return self._on_step


def is_swallowed(frame: FrameType | None) -> bool:
    """Return whether Python would print an exception raised in this frame and go on.

    It does in destructors and in what the garbage collector calls. The collector may run while
    CPython 3.11 makes the frame that it is about to trace. If the trace function raises then, the
    trace function is freed, and called nevertheless: `'traceback' object is not callable`.
    """
    of_collector = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in of_collector:
            return True
        frame = frame.f_back
    return False
