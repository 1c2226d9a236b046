"""Calls end as ever while a handler of the program's, on the logger "farcall", always raises."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from behaviour.helpers import PATIENCE, Gate
from farcall import rpc
from farcall.errors import PeerLost, RemoteError, RpcTimeout, SerializationError
from farcall.runtime.agent import Agent
from farcall.runtime.calls import call_completion

KINDS = [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit]


class Raising(logging.Handler):
    """Raises in each thread but the main one, where a KeyboardInterrupt would be Ctrl-C."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.kind is not KeyboardInterrupt or not is_main():
            raise self.kind("from a handler of the log")


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def handler(request: pytest.FixtureRequest) -> Iterator[Raising]:
    """Attached before the workers start, at the level DEBUG."""
    logger = logging.getLogger("farcall")
    handler = Raising(request.param)
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise ValueError("can't be pickled")

    def __str__(self) -> str:
        raise ValueError("has no text")


def fine() -> str:
    return "fine"


def fails() -> None:
    raise ValueError("as it should")


def fails_unsendably() -> None:
    raise Unsendable


def gives_what_cannot_be_sent() -> Any:
    return threading.Lock()


def test_calls_end(handler: Raising, pair: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_completion, "SLOW_SECONDS", 0.0)  # each call is worth a line
    for way in (rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait()):
        assert way("w1", fine) == "fine"
        with pytest.raises(ValueError, match="as it should"):
            way("w1", fails)
        with pytest.raises(RemoteError):
            way("w1", fails_unsendably)
        with pytest.raises(SerializationError, match="can't be sent"):
            way("w1", gives_what_cannot_be_sent)
    with pytest.raises(ValueError, match="as it should"):
        rpc.remote("w1", fails).to_here()
    assert rpc.rpc_sync("w1", fine) == "fine"


def test_failures_that_nobody_looks_at(handler: Raising, pair: list[Agent]) -> None:
    rpc.rpc_async("w1", fails)
    rpc.rpc_async("w1", fine).then(lambda _: fails())
    deadline = time.monotonic() + PATIENCE
    while sum("as it should" in line for line in list(handler.lines)) < 2:
        assert time.monotonic() < deadline
        assert rpc.rpc_sync("w1", fine) == "fine"


def test_callbacks_that_raise(handler: Raising, pair: list[Agent]) -> None:
    def raise_it(_: object) -> None:
        fails()

    future = rpc.rpc_async("w1", fine)
    future.add_done_callback(raise_it)
    assert future.wait() == "fine"
    assert rpc.rpc_async("w1", fine).then(lambda done: done.value()).wait() == "fine"


def test_a_lost_peer(handler: Raising, trio: list[Agent], gate: Gate) -> None:
    waiting = rpc.rpc_async("w2", gate.wait)
    gate.wait_for_arrivals()
    trio[2].close("it fails", patience=0.0)
    with pytest.raises(PeerLost):
        waiting.wait()
    assert rpc.rpc_sync("w1", fine) == "fine"


def test_timeouts_and_the_end(handler: Raising, pair: list[Agent], gate: Gate) -> None:
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", gate.wait, timeout=0.05)
    gate.open()
    ends = [threading.Thread(target=agent.shutdown, args=(True, PATIENCE)) for agent in pair]
    for end in ends:
        end.start()
    for end in ends:
        end.join(PATIENCE)
    assert not any(end.is_alive() for end in ends)
    assert all(agent.status.is_closed for agent in pair)
