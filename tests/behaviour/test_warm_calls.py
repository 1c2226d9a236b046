"""The frames of Python that a warm call takes on either side.

Time decides no test, so this counts. Each frame takes some 60 ns of a call of 11 us. Issue 23 had
added a dozen, one by one, and none of them was noticed. A change that adds one on purpose changes
the number here, and says what `make bench` gives.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import TRANSPORTS
from farcall.transport.base import Arrived, Event
from farcall.wire.messages import Reply, Request

pytestmark = [
    pytest.mark.parametrize("transport", ["native"]),
    pytest.mark.skipif("native" not in TRANSPORTS, reason="it counts what the native one takes"),
]

WARM = 50  # calls before those that are counted
COUNTED = 5


def nothing() -> None:
    return None


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


class Frames:
    """The names of the functions of Python that are called inside the block, by this thread."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> list[str]:
        sys.setprofile(self._note)
        return self.names

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is not Frames.__exit__.__code__:
            self.names.append(frame.f_code.co_qualname)


def least(counts: list[list[str]]) -> list[str]:
    """Return the names of the call with the fewest: finalizers may run in any call."""
    return min(counts, key=len)


def at_the_caller(
    call: Callable[[], Any], then: Callable[[Any], object] = lambda _: None
) -> list[str]:
    """Return the caller's frames in `call`, but not those of the use of its result then."""
    counts = []
    results = []  # kept, so that none ends in the middle of another call
    for number in range(WARM + COUNTED):
        with Frames() as names:
            results.append(call())
        then(results[-1])
        if number >= WARM:
            counts.append(names)
    return least(counts)


def at_the_other_end(
    call: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    agent: Agent,
    kind: type[Request | Reply],
) -> list[str]:
    """Return an agent's frames for a message of this kind, which comes with each call."""
    for _ in range(WARM):
        call()
    handle = Agent.handle
    counts: list[list[str]] = []
    all_there = threading.Event()

    def counted(self: Agent, event: Event) -> None:
        if self is not agent or not isinstance(event, Arrived) or all_there.is_set():
            handle(self, event)
        elif type(event.frame.message) is kind:
            with Frames() as names:
                handle(self, event)
            counts.append(names)
            if len(counts) == COUNTED:
                all_there.set()
        else:
            handle(self, event)

    monkeypatch.setattr(Agent, "handle", counted)
    for _ in range(COUNTED):
        call()
    assert all_there.wait(PATIENCE)
    return least(counts)


def test_a_call_at_the_caller(pair: list[Agent]) -> None:
    names = at_the_caller(lambda: rpc.rpc_sync("w1", nothing))
    assert len(names) <= 25, names


def test_a_call_at_the_callee(pair: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    call = partial(rpc.rpc_sync, "w1", nothing)
    names = at_the_other_end(call, monkeypatch, pair[1], Request)
    assert len(names) <= 23, names


def test_a_call_of_a_method_at_the_caller(pair: list[Agent]) -> None:
    counter = rpc.remote("w1", Counter)
    names = at_the_caller(lambda: counter.rpc_sync().add(1))
    assert len(names) <= 35, names


def test_a_call_of_a_method_at_the_callee(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = rpc.remote("w1", Counter)
    names = at_the_other_end(lambda: counter.rpc_sync().add(1), monkeypatch, pair[1], Request)
    assert len(names) <= 33, names


def test_an_asynchronous_call_at_the_caller(pair: list[Agent]) -> None:
    # Waits for each: else a slow callee lets the next call wait in a box.
    names = at_the_caller(lambda: rpc.rpc_async("w1", nothing), then=torch.futures.Future.wait)
    assert len(names) <= 18, names


def test_the_answer_of_an_asynchronous_call(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = lambda: rpc.rpc_async("w1", nothing).wait()  # noqa: E731
    names = at_the_other_end(call, monkeypatch, pair[0], Reply)
    assert len(names) <= 10, names


def call_back() -> list[str]:
    """Call the caller back; return its frames."""
    return at_the_caller(lambda: rpc.rpc_sync("w0", nothing))


def test_a_call_that_a_served_function_makes(pair: list[Agent]) -> None:
    names = rpc.rpc_sync("w1", call_back)
    assert len(names) <= 36, names


def test_an_asynchronous_call_at_the_callee(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = lambda: rpc.rpc_async("w1", nothing).wait()  # noqa: E731
    names = at_the_other_end(call, monkeypatch, pair[1], Request)
    assert len(names) <= 23, names


def call_back_async() -> list[str]:
    """Call the caller without waiting at once, as a served function; return the frames of that."""
    return at_the_caller(lambda: rpc.rpc_async("w0", nothing), then=torch.futures.Future.wait)


def call_back_remote() -> list[str]:
    """Make a value on the caller, as a served function; return the frames of that."""
    return at_the_caller(lambda: rpc.remote("w0", nothing), then=rpc.RRef.to_here)


def test_an_asynchronous_call_that_a_served_function_makes(pair: list[Agent]) -> None:
    names = rpc.rpc_sync("w1", call_back_async)
    assert len(names) <= 21, names


def test_a_remote_call_that_a_served_function_makes(pair: list[Agent]) -> None:
    names = rpc.rpc_sync("w1", call_back_remote)
    assert len(names) <= 34, names


def ask_async() -> None:
    """Call the caller without waiting at once."""
    rpc.rpc_async("w0", nothing).wait()


def ask_remote() -> None:
    """Make a value on the caller. To fetch it would be a request more."""
    rpc.remote("w0", nothing)


def test_an_asynchronous_call_of_a_served_function_at_the_callee(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = partial(rpc.rpc_sync, "w1", ask_async)
    names = at_the_other_end(call, monkeypatch, pair[0], Request)
    assert len(names) <= 23, names


def test_a_remote_call_of_a_served_function_at_the_owner(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = partial(rpc.rpc_sync, "w1", ask_remote)
    names = at_the_other_end(call, monkeypatch, pair[0], Request)
    assert len(names) <= 43, names


def test_a_remote_call_at_the_caller(pair: list[Agent]) -> None:
    names = at_the_caller(lambda: rpc.remote("w1", nothing), then=rpc.RRef.to_here)
    assert len(names) <= 31, names


def test_a_remote_call_at_the_owner(pair: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    call = lambda: rpc.remote("w1", nothing)._handle  # noqa: E731
    names = at_the_other_end(call, monkeypatch, pair[1], Request)
    assert len(names) <= 43, names


def test_an_agent_has_no_more_attributes_than_python_finds_fast(pair: list[Agent]) -> None:
    """CPython 3.11 and 3.12 look up attributes of an object with more than 29 in a slower way.

    With 30, a method by reference took a twentieth longer.
    """
    assert len(vars(pair[0])) <= 29
    assert len(vars(pair[0].directory.resolve("w1"))) <= 29
