"""Ctrl-C at every point where Python looks at signals, in the thread that makes calls.

A trace function raises KeyboardInterrupt there, at one point after the other: when a function of
farcall begins, after it has called a function of C, and when a loop begins again.
"""

from __future__ import annotations

import contextvars
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
import torch
from patience import PATIENCE

from behaviour.helpers import Gate, echo, in_threads, wait_at, wait_until
from farcall import autograd, rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

pytestmark = pytest.mark.timeout(600)

CALLS = ("CALL", "CALL_FUNCTION_EX")


@cache
def instructions(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


@cache
def handler_at(code: CodeType, offset: int) -> int | None:
    """Where an exception goes that is raised by the instruction at this offset."""
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
        if looks and not is_in_finalizer(frame):
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, {now}"
                signal.default_int_handler(signal.SIGINT, None)  # raises, as for a Ctrl-C
        return self._on_step


def is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would swallow the interrupt."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def by_sync(reference: Any) -> None:
    rpc.rpc_sync("w1", echo, args=(1,))


def by_async(reference: Any) -> None:
    rpc.rpc_async("w1", echo, args=(1,)).wait()


def by_remote(reference: Any) -> None:
    rpc.remote("w1", echo, args=(1,)).to_here()


def by_reference(reference: Any) -> None:
    rpc.rpc_sync("w1", echo, args=(reference,))


def by_backward(reference: Any) -> None:
    # An interrupt at the very beginning of `__exit__` leaves the block open (decisions/ctrl-c.md).
    contextvars.copy_context().run(backward)


def backward() -> None:
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context, [rpc.rpc_sync("w1", torch.add, args=(x, x)).sum()])


def check(agents: list[Agent], where: str) -> None:
    """From another thread, so that a lock that the interrupted one still holds is noticed."""

    def work() -> None:
        with acting_as(agents[0]):
            assert rpc.rpc_sync("w1", echo, args=(2,), timeout=PATIENCE) == 2
            assert rpc.rpc_async("w1", echo, args=(3,), timeout=PATIENCE).wait() == 3
        with acting_as(agents[1]):
            assert rpc.rpc_sync("w0", echo, args=(2,), timeout=PATIENCE) == 2

    with in_threads(work) as results:
        pass
    assert results == [None], where
    for agent in agents:
        wait_until(lambda agent=agent: not agent.leaver.active)


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)), reason="knows their bytecode")
@pytest.mark.parametrize("way", [by_sync, by_async, by_remote, by_reference, by_backward])
def test_everything_works_after_an_interrupt_at_any_point(
    pair: list[Agent], way: Callable[[Any], None], gate: Gate
) -> None:
    check(pair, "before")
    other = rpc.rpc_async("w1", wait_at, args=(gate, 5), timeout=0)
    gate.wait_for_arrivals()
    interrupts = 0
    gc.disable()
    try:
        for number in range(1, 10_000):
            reference = rpc.RRef(1)
            interrupt = Interrupt(number)
            interrupts += interrupt.run(lambda reference=reference: way(reference))
            if not interrupt.where:
                break
            wait_until(lambda: pair[0].leaver.active <= 1)
    finally:
        gc.enable()
    assert interrupts > 20
    gate.open()
    assert other.wait() == 5
    check(pair, interrupt.where)


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)), reason="knows their bytecode")
@pytest.mark.parametrize("transport", ["inproc"])
def test_a_thread_that_is_interrupted_while_it_stands_back_does_not_stop_the_leader(
    pair: list[Agent],
) -> None:
    executor = pair[0].executor
    interrupts = 0
    for number in range(1, 1000):
        executor.begin_row()
        interrupt = Interrupt(number)
        interrupts += interrupt.run(executor.let_complete)
        with in_threads(executor.end_row):
            pass
        if not interrupt.where:
            break
    assert interrupts
    check(pair, "standing back")
