"""Functions that simulated workers call on each other."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from farcall import rpc
from farcall.rref import RRef
from simulator.system.scheduler import Scheduler, SimThread


class Runs(Protocol):
    """Is told of each run of a function."""

    def ran(self, call: int, at: SimThread) -> None: ...


def note(call: int) -> SimThread:
    """Say that a call runs, in this thread."""
    me = Scheduler.current()
    assert me is not None
    runs: Runs = me.process.world
    runs.ran(call, me)
    return me


class Refused(Exception):
    """Raised by a function that is to raise."""


def work(call: int, seconds: float = 0.0, size: int = 0, fails: bool = False) -> Any:
    """Run for some seconds, and give the number of the call and some bytes."""
    me = note(call)
    if seconds:
        me.scheduler.sleep(me.scheduler.now + seconds)
    if fails:
        raise Refused(call)
    return call, b"x" * size


def relay(call: int, to: str, timeout: float) -> Any:
    """Call another worker, and give what that gives."""
    note(call)
    return rpc.rpc_sync(to, echo, (call,), timeout=timeout)


def echo(value: Any) -> Any:
    """Give the argument."""
    return value


def use(call: int, reference: RRef[Any], timeout: float) -> Any:
    """Give the value of a reference."""
    note(call)
    return call, reference.to_here(timeout=timeout)[0]


def scale(call: int, tensor: torch.Tensor) -> torch.Tensor:
    """Give three times a tensor."""
    note(call)
    return 3 * tensor
