"""How many frames of Python a warm call takes on either side.

Time decides no test, so this counts. Each frame takes some 60 ns of a call of 11 us; issue 23 had
added a dozen, one by one, and each seemed to cost nothing. Who adds one on purpose changes the
number here, and measures (`make bench`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

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

WARM = 50  # calls before the one that is counted


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


def counting(
    monkeypatch: pytest.MonkeyPatch, agent: Agent, kind: type[Request | Reply]
) -> Callable[[], list[str]]:
    """Have the next message of a kind that an agent handles counted; gives how to get the names."""
    handle = Agent.handle
    done = threading.Event()
    frames = Frames()

    def counted(self: Agent, event: Event) -> None:
        is_it = self is agent and isinstance(event, Arrived) and type(event.frame.message) is kind
        if not is_it or done.is_set():
            handle(self, event)
            return
        with frames:
            handle(self, event)
        done.set()

    monkeypatch.setattr(Agent, "handle", counted)

    def names() -> list[str]:
        assert done.wait(PATIENCE)
        return frames.names

    return names


def test_a_call_at_the_caller(pair: list[Agent]) -> None:
    for _ in range(WARM):
        rpc.rpc_sync("w1", nothing)
    with Frames() as names:
        rpc.rpc_sync("w1", nothing)
    assert len(names) <= 24, names


def test_a_call_at_the_callee(pair: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(WARM):
        rpc.rpc_sync("w1", nothing)
    names = counting(monkeypatch, pair[1], Request)
    rpc.rpc_sync("w1", nothing)
    assert len(names()) <= 24, names()


def test_a_call_of_a_method_at_the_caller(pair: list[Agent]) -> None:
    counter = rpc.remote("w1", Counter)
    for _ in range(WARM):
        counter.rpc_sync().add(1)
    with Frames() as names:
        counter.rpc_sync().add(1)
    assert len(names) <= 37, names


def test_a_call_of_a_method_at_the_callee(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = rpc.remote("w1", Counter)
    for _ in range(WARM):
        counter.rpc_sync().add(1)
    names = counting(monkeypatch, pair[1], Request)
    counter.rpc_sync().add(1)
    assert len(names()) <= 34, names()


def test_an_asynchronous_call_at_the_caller(pair: list[Agent]) -> None:
    for _ in range(WARM):
        rpc.rpc_async("w1", nothing).wait()
    with Frames() as names:
        future = rpc.rpc_async("w1", nothing)
    future.wait()
    assert len(names) <= 18, names


def test_the_answer_of_an_asynchronous_call(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(WARM):
        rpc.rpc_async("w1", nothing).wait()
    names = counting(monkeypatch, pair[0], Reply)
    rpc.rpc_async("w1", nothing).wait()
    assert len(names()) <= 11, names()
