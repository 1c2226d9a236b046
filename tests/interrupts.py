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
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest

needs_its_bytecode = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)), reason="knows their bytecode"
)
# Kinds of instructions; all others are 0.
BEGINS, JUMPS_BACK, CALLS = 1, 2, 3
KINDS = {"RESUME": BEGINS, "JUMP_BACKWARD": JUMPS_BACK, "CALL": CALLS, "CALL_FUNCTION_EX": CALLS}


@cache
def instructions(code: CodeType) -> tuple[bytes, Sequence[int]]:
    """Return the kind of each offset's instruction, and the handler of an exception raised there.

    The handler is -1 if there is none.
    """
    kinds = bytearray(len(code.co_code))
    for one in dis.get_instructions(code):
        kinds[one.offset] = KINDS.get(one.opname, 0)
    handlers = [-1] * len(kinds)
    for entry in reversed(dis._parse_exception_table(code)):  # type: ignore[attr-defined]
        handlers[entry.start : entry.end] = [entry.target] * (entry.end - entry.start)
    return bytes(kinds), handlers


class Interrupt:
    """Raises KeyboardInterrupt once, at the point of this number in farcall or `threading`."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self.has_returned = False  # from a function of Python: there is no look at signals
        self._runs: FrameType | None = None
        self._of_collector: set[CodeType | None] = set()

    def run(self, function: Callable[[], object]) -> bool:
        """Return whether it was raised by the function."""
        usual = sys.gettrace()
        self._runs = sys._getframe()
        self._of_collector = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        sys.settrace(self._on_call)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(usual)
            self._runs = None
        return False

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if self.where or not ("/farcall/" in file or file == threading.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return Steps(self, frame.f_code)

    def count(self, frame: FrameType) -> None:
        """Count a point at which Python looks at signals."""
        self.left -= 1
        if not self.left:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            signal.default_int_handler(signal.SIGINT, None)  # raises, as for a Ctrl-C

    def is_swallowed(self, frame: FrameType | None) -> bool:
        """Return whether Python would print an exception raised in this frame and go on.

        It does in destructors and in what the garbage collector calls. The collector may run while
        CPython 3.11 makes the frame that it is about to trace. If the trace function raises then,
        the trace function is freed, and called nevertheless: `'traceback' object is not callable`.
        """
        while frame is not None and frame is not self._runs:
            if frame.f_code.co_name == "__del__" or frame.f_code in self._of_collector:
                return True
            frame = frame.f_back
        return False


class Steps:
    """Called for each instruction of one call of a function, of each run: a million times."""

    __slots__ = ("handlers", "interrupt", "kinds", "last")

    def __init__(self, interrupt: Interrupt, code: CodeType) -> None:
        self.interrupt = interrupt
        self.kinds, self.handlers = instructions(code)
        self.last = 0  # the offset of the last instruction, if that was special

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        interrupt = self.interrupt
        if interrupt.where:
            return None
        if event != "opcode":
            if event == "return":
                interrupt.has_returned = True
            return self
        now = frame.f_lasti
        has_returned, interrupt.has_returned = interrupt.has_returned, False
        last, self.last = self.last, now if self.kinds[now] > BEGINS else 0
        looks = self.kinds[now] == BEGINS or self.kinds[last] == JUMPS_BACK
        # Python looks while it is still at the call. One step later another handler may be in
        # charge: a call at the end of a `with` block is inside, the next instruction is not.
        looks = looks or (
            self.kinds[last] == CALLS
            and not has_returned
            and self.handlers[last] == self.handlers[now]
        )
        if looks and not interrupt.is_swallowed(frame):
            interrupt.count(frame)
        return self
