"""Calls that the destructors of the user's objects make, also in the middle of farcall."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.helpers import Gate, echo, wait_until
from farcall import rpc
from farcall.errors import Cancelled, UnknownWorker
from farcall.runtime.agent import Agent
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
    gc.collect()
    assert len(futures) == 2 * ROUNDS
    assert [future.wait() for future in futures[::2]] == [1] * ROUNDS
    assert [future.wait().to_here() for future in futures[1::2]] == [3] * ROUNDS


def test_collected_destructor_can_not_wait(pair: list[Agent]) -> None:
    uses: dict[str, Callable[[], object]] = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", echo, args=(1,)),
        "remote": lambda: rpc.remote("w1", echo, args=(1,)),
        "RRef": lambda: rpc.RRef(1),
        "Future.wait": lambda: rpc.rpc_async("w1", echo, args=(1,)).wait(),
        "shutdown": pair[0].shutdown,
    }
    refused: list[str] = []

    def try_all() -> None:
        for name, use in uses.items():
            with pytest.raises(RuntimeError, match=f"{name} can't be used in a destructor"):
                use()
            refused.append(name)

    Ending(try_all)
    gc.collect()
    assert refused == list(uses)
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


def test_destructor_that_is_not_collected_may_do_anything(pair: list[Agent]) -> None:
    values: list[Any] = []
    ending = Ending(lambda: values.append(rpc.remote("w1", echo, args=(1,)).to_here()))
    del ending.me, ending
    assert values == [1]


def test_call_of_a_collected_destructor_fails_as_others_do(pair: list[Agent]) -> None:
    futures: list[rpc.Future[Any]] = []
    Ending(lambda: futures.append(rpc.rpc_async("nobody", echo, args=(1,))))
    gc.collect()
    with pytest.raises(UnknownWorker, match="nobody"):
        futures[0].wait()


def test_call_of_a_collected_destructor_ends_with_the_agent(pair: list[Agent], gate: Gate) -> None:
    futures: list[rpc.Future[Any]] = []
    with acting_as(pair[0]):
        Ending(lambda: futures.append(rpc.rpc_async("w1", gate.wait)))
        gc.collect()
        wait_until(lambda: gate.inside == 1)
    pair[0].close()
    gate.open()
    with pytest.raises(Cancelled):
        futures[0].wait()


def test_closed_agents_do_not_listen_to_the_collector(pair: list[Agent]) -> None:
    listening = len(gc.callbacks)
    for agent in pair:
        agent.close()
    assert len(gc.callbacks) == listening - 2
