"""Calls end as ever while a handler of the program's always raises, or makes calls itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.helpers import PATIENCE, Gate
from farcall import rpc
from farcall.errors import PeerLost, RemoteError, RpcTimeout, SerializationError
from farcall.runtime.agent import Agent
from farcall.runtime.calls import call_completion
from farcall.runtime.current import set_default_agent

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


def attached(handler: logging.Handler, level: int) -> Iterator[None]:
    """Attach a handler while the rest of a test runs."""
    logger = logging.getLogger("farcall")
    before = logger.level, logger.propagate
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def handler(request: pytest.FixtureRequest) -> Iterator[Raising]:
    """Attached before the workers start, at the level DEBUG."""
    handler = Raising(request.param)
    for _ in attached(handler, logging.DEBUG):
        yield handler


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


def test_failures_that_no_code_looks_at(handler: Raising, pair: list[Agent]) -> None:
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


CALLS: dict[str, Callable[[], object]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w1", fine, timeout=PATIENCE),
    "rpc_async": lambda: rpc.rpc_async("w1", fine, timeout=PATIENCE).wait(),
    "remote": lambda: rpc.remote("w1", fine, timeout=PATIENCE).to_here(PATIENCE),
}
LEVELS = [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]


class Calling(logging.Handler):
    """Makes a call at each record, in whatever thread gets it, and waits for that."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.outcomes: list[type[BaseException] | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.call()
        except BaseException as error:
            self.outcomes.append(type(error))
        else:
            self.outcomes.append(None)

    def check(self) -> None:
        """Check that none of the calls has waited for what its own thread kept."""
        assert rpc.RpcTimeout not in self.outcomes


@pytest.fixture(
    params=[*((way, logging.DEBUG) for way in CALLS), *(("rpc_sync", one) for one in LEVELS[1:])],
    ids=lambda param: f"{param[0]}-{logging.getLevelName(param[1])}",
)
def calling(request: pytest.FixtureRequest, brief_handlers: None) -> Iterator[Calling]:
    """Attached before the workers start."""
    way, level = request.param
    handler = Calling(CALLS[way])
    for _ in attached(handler, level):
        yield handler
    set_default_agent(None)


def in_own_thread(run: Callable[[], object]) -> None:
    """Run something in a thread that the program has started."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert errors == []


def test_calls_that_a_handler_makes_hold_nothing_up(
    calling: Calling, trio: list[Agent], gate: Gate
) -> None:
    set_default_agent(trio[0])
    in_own_thread(lambda: rpc.rpc_sync("w1", fine))  # dials in that thread
    assert rpc.remote("w2", fine).to_here() == "fine"
    with pytest.raises(ValueError, match="as it should"):
        rpc.rpc_sync("w1", fails)
    rpc.rpc_async("w1", fails)  # nothing looks at its failure
    waiting = rpc.rpc_async("w2", gate.wait)
    gate.wait_for_arrivals()
    trio[2].close("it fails", patience=0.0)
    with pytest.raises(PeerLost):
        waiting.wait()
    with pytest.raises(PeerLost):
        rpc.rpc_sync("w2", fine)
    assert rpc.rpc_sync("w1", fine) == "fine"
    gate.open()
    ends = [threading.Thread(target=agent.shutdown, args=(True, PATIENCE)) for agent in trio[:2]]
    for end in ends:
        end.start()
    for end in ends:
        end.join(PATIENCE)
    assert all(agent.status.is_closed for agent in trio)
    calling.check()


@pytest.mark.parametrize("where", ["main", "own"])
def test_first_call_may_be_made_in_a_handler(
    calling: Calling, pair: list[Agent], where: str
) -> None:
    """Handle a record of the program's own, while farcall logs that it dials."""
    set_default_agent(pair[0])
    logger = logging.getLogger("a program")
    logger.addHandler(calling)
    try:
        if where == "main":
            logger.error("something happened")
        else:
            in_own_thread(lambda: logger.error("something happened"))
    finally:
        logger.removeHandler(calling)
    calling.check()
    assert None in calling.outcomes
