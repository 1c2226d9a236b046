"""Calls that the destructors of the user's objects make, also in the middle of farcall."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.helpers import Gate, echo, wait_until
from farcall import autograd, rpc
from farcall.errors import Cancelled, UnknownWorker
from farcall.runtime.agent import Agent
from farcall.runtime.current import default_agent, set_default_agent
from farcall.testing.cluster import acting_as

ROUNDS = 300


class Ending:
    """Does something at its end. In a cycle, so that the garbage collector ends it."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do
        self.me = self

    def __del__(self) -> None:
        self.do()


@pytest.fixture
def often() -> Iterator[None]:
    """Garbage is collected at nearly every object that is made."""
    usual = gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    yield
    gc.set_threshold(*usual)


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Garbage is collected by the test, and by no other thread."""
    gc.disable()
    yield
    gc.enable()


def collect(is_done: Callable[[], bool]) -> None:
    """Collect garbage. While another thread does, `gc.collect` returns at once."""
    wait_until(lambda: gc.collect() >= 0 and is_done())


@pytest.mark.usefixtures("often")
def test_collected_destructor_may_call_in_the_middle_of_anything(pair: list[Agent]) -> None:
    futures: list[rpc.Future[Any]] = []
    own = rpc.RRef(3)

    def call() -> None:
        futures.append(pair[0].call_async("w1", echo, (1,)))
        futures.append(pair[0].call_async("w1", echo, (own,)))

    for _ in range(ROUNDS):
        Ending(call)
        made = rpc.remote("w1", echo, args=(2,))
        assert rpc.rpc_sync("w1", echo, args=(own,)).to_here() == 3
        assert rpc.rpc_async("w1", echo, args=(made,)).wait().to_here() == 2
    collect(lambda: len(futures) == 2 * ROUNDS)
    assert [future.wait() for future in futures[::2]] == [1] * ROUNDS
    assert [future.wait().to_here() for future in futures[1::2]] == [3] * ROUNDS


@pytest.mark.usefixtures("by_hand")
def test_collected_destructor_can_not_wait(pair: list[Agent], gate: Gate) -> None:
    ready, unready = rpc.RRef(1), rpc.remote("w0", gate.wait)
    uses: dict[str, Callable[[], object]] = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", echo, args=(1,)),
        "remote": lambda: rpc.remote("w1", echo, args=(1,)),
        "RRef": lambda: rpc.RRef(1),
        "the value of an RRef that is not made yet": unready.to_here,
        "Future.wait": lambda: rpc.rpc_async("w1", gate.wait).wait(),
        "get_worker_info": lambda: rpc.get_worker_info("w1"),
        "farcall.autograd": autograd.context().__enter__,
        "shutdown": rpc.shutdown,
        "workers": rpc.workers,
        "wait_for": lambda: rpc.wait_for("w1"),
        "explain": lambda: rpc.explain("w1"),
        "on_join": lambda: rpc.on_join(echo),
        "on_leave": lambda: rpc.on_leave(echo),
        "membership": rpc.membership,
        "all_gather": lambda: rpc.all_gather(1, ["w0"]),
        "gather": lambda: rpc.gather(1, "w0", ["w0"]),
        "barrier": lambda: rpc.barrier(["w0"]),
        "get_object": lambda: rpc.get_object("it"),
        "supervise": lambda: rpc.supervise(echo, (1,), on="w1"),
        "kill": lambda: rpc.kill(ready),
    }
    functions = {name for name in rpc.__all__ if inspect.isfunction(getattr(rpc, name))}
    # The first two don't wait, the last one has no agent.
    assert functions - uses.keys() == {"rpc_async", "cancelled", "init_rpc"}
    refused: list[str] = []

    def try_all() -> None:
        assert ready.to_here() == 1
        for name, use in uses.items():
            with pytest.raises(RuntimeError, match=f"{name} can't be used in a destructor"):
                use()
            refused.append(name)

    Ending(try_all)
    collect(lambda: refused == list(uses))
    gate.open()
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


@pytest.mark.usefixtures("by_hand")
def test_refused_shutdown_leaves_the_agent_in_its_place(pair: list[Agent]) -> None:
    refused: list[str] = []

    def shut_down() -> None:
        with pytest.raises(RuntimeError, match="can't be used in a destructor"):
            rpc.shutdown()
        refused.append("shutdown")

    set_default_agent(pair[0])
    try:
        Ending(shut_down)
        collect(lambda: bool(refused))
        assert default_agent() is pair[0]
    finally:
        set_default_agent(None)


def test_destructor_that_is_not_collected_may_do_anything(pair: list[Agent]) -> None:
    values: list[Any] = []
    ending = Ending(lambda: values.append(rpc.remote("w1", echo, args=(1,)).to_here()))
    del ending.me, ending
    assert values == [1]


@pytest.mark.usefixtures("by_hand")
def test_call_of_a_collected_destructor_fails_as_others_do(pair: list[Agent]) -> None:
    futures: list[rpc.Future[Any]] = []
    Ending(lambda: futures.append(rpc.rpc_async("nobody", echo, args=(1,))))
    collect(lambda: bool(futures))
    with pytest.raises(UnknownWorker, match="nobody"):
        futures[0].wait()


@pytest.mark.usefixtures("by_hand")
def test_call_of_a_collected_destructor_ends_with_the_agent(pair: list[Agent], gate: Gate) -> None:
    futures: list[rpc.Future[Any]] = []
    with acting_as(pair[0]):
        Ending(lambda: futures.append(rpc.rpc_async("w1", gate.wait)))
        collect(lambda: bool(futures))
        wait_until(lambda: gate.inside == 1)
    pair[0].close()
    gate.open()
    with pytest.raises(Cancelled):
        futures[0].wait()


def test_call_of_a_collected_destructor_after_the_end(pair: list[Agent]) -> None:
    futures: list[rpc.Future[Any]] = []
    pair[0].close()
    # Closed agents don't listen, so this is how the moment between both looks.
    futures.append(pair[0]._client._call_soon("w1", echo, (1,), None, None))
    with pytest.raises(Cancelled, match="was shut down"):
        futures[0].wait()


def test_closed_agents_do_not_listen_to_the_collector(pair: list[Agent]) -> None:
    listening = len(gc.callbacks)
    for agent in pair:
        agent.close()
    assert len(gc.callbacks) == listening - 2
