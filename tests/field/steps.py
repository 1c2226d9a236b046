"""Steps of several trials, run in the members of a crew."""

from __future__ import annotations

import ctypes
import operator
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

import torch

from farcall import rpc
from farcall.runtime.current import current_agent

_losses: list[str] = []
_lost_at: list[float] = []
_listening = ExitStack()


class Outcome(NamedTuple):
    """The end of a call. Times are of `time.monotonic`, which all processes of a host share."""

    kind: str  # "value", or the error's type
    began: float
    ended: float
    returned: float  # when the call that does not wait came back

    @property
    def took(self) -> float:
        return self.ended - self.began


def listen() -> None:
    """Note who is declared dead from now on."""

    def note(loss: BaseException) -> None:
        _lost_at.append(time.monotonic())
        _losses.append(str(loss))

    _listening.enter_context(current_agent().losses.subscribed(note))


def losses() -> list[str]:
    return _losses


def lost_at() -> list[float]:
    return _lost_at


def wait_for_loss(patience: float) -> list[float]:
    """Return when each worker was declared dead, as soon as one was."""
    end = time.monotonic() + patience
    while not _lost_at and time.monotonic() < end:
        time.sleep(0.05)
    return _lost_at


def ready() -> float:
    """Now, by the clock that all processes share."""
    return time.monotonic()


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return 3


def pause_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def hold_interpreter(at: float, seconds: int) -> float:
    """Hold the GIL in C. Returns the time at which it was released."""
    pause_until(at)
    ctypes.PyDLL(None).sleep(seconds)
    return time.monotonic()


def attempt(to: str, timeout: float, at: float = 0.0, lasts: float = 0.0) -> Outcome:
    """Call a function that takes `lasts` seconds, at that moment."""
    pause_until(at)
    began = returned = time.monotonic()
    try:
        future = (
            rpc.rpc_async(to, sleep, args=(lasts,), timeout=timeout) if lasts
            else rpc.rpc_async(to, operator.add, args=(1, 2), timeout=timeout)
        )  # fmt: skip
        returned = time.monotonic()
        value = future.wait()
        kind = "value" if value == 3 else f"wrong value {value!r}"
    except Exception as error:
        kind = type(error).__name__
    return Outcome(kind, began, time.monotonic(), returned)


def attempt_while_holding(
    to: str, timeout: float, at: float, lasts: float, hold_at: float, seconds: int
) -> tuple[Outcome, float]:
    """Run `attempt` while another thread holds the GIL; also return when that thread let go."""
    released: list[float] = []
    holder = threading.Thread(target=lambda: released.append(hold_interpreter(hold_at, seconds)))
    holder.start()
    outcome = attempt(to, timeout, at, lasts)
    holder.join()
    return outcome, released[0]


def call_until_value(to: str, patience: float) -> float | None:
    """Return the seconds until a call succeeded; None if it did not."""
    began = time.monotonic()
    while time.monotonic() < began + patience:
        if attempt(to, 5.0).kind == "value":
            return time.monotonic() - began
        time.sleep(0.05)
    return None


def ask_without_waiting(to: str) -> tuple[float, float, str, float]:
    """`rpc_async` and `remote`: seconds until each returned, how they ended, and when."""
    began = time.monotonic()
    future = rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0)
    between = time.monotonic()
    made = rpc.remote(to, dict, timeout=0)
    returned = time.monotonic()
    kinds = []
    for wait in (future.wait, made.to_here):
        try:
            wait()
            kinds.append("value")
        except Exception as error:
            kinds.append(type(error).__name__)
    return between - began, returned - between, "+".join(kinds), time.monotonic()


def load_until_error(to: str, megabytes: int) -> tuple[str, float]:
    """Send tensors, without a timeout, until a call fails; how, and when."""
    value = torch.ones(megabytes << 18)
    while True:
        try:
            rpc.rpc_sync(to, torch.numel, args=(value,), timeout=0)
        except Exception as error:
            return type(error).__name__, time.monotonic()
