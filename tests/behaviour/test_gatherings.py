"""`rpc.all_gather`, `rpc.gather` and `rpc.barrier`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, wait_until
from behaviour.open_group import OpenGroup
from farcall import rpc
from farcall.errors import PeerLost, RpcTimeout
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

SHORT = 0.3  # seconds in which no worker comes
ALL = ["w0", "w1", "w2"]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def at(pool: ThreadPoolExecutor, agent: Agent, act: Callable[[], Any]) -> Future[Any]:
    def run() -> Any:
        with acting_as(agent):
            return act()

    return pool.submit(run)


def has_come(leader: Agent, count: int) -> bool:
    """Return whether so many have come to a gathering that goes on."""
    return any(len(one.come) == count for one in leader.group.gatherings.incomplete())


def outcomes(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception(PATIENCE) or future.result() for future in futures]


def test_all_get_the_values_of_all(trio: list[Agent], pool: ThreadPoolExecutor) -> None:
    done = [at(pool, one, lambda one=one: rpc.all_gather(one.me.id, ALL)) for one in trio]
    assert outcomes(done) == [{"w0": 0, "w1": 1, "w2": 2}] * 3


def test_one_gets_the_values_of_all(trio: list[Agent], pool: ThreadPoolExecutor) -> None:
    done = [at(pool, one, lambda one=one: rpc.gather(one.me.id, "w1", ALL)) for one in trio]
    assert outcomes(done) == [None, {"w0": 0, "w1": 1, "w2": 2}, None]


def test_tensors_are_gathered(pair: list[Agent], pool: ThreadPoolExecutor) -> None:
    done = [at(pool, one, lambda: rpc.all_gather(torch.ones(3))) for one in pair]
    for values in outcomes(done):
        assert torch.equal(values["w0"] + values["w1"], torch.full((3,), 2.0))


def test_a_barrier_waits_for_the_last(trio: list[Agent], pool: ThreadPoolExecutor) -> None:
    first = [at(pool, one, lambda: rpc.barrier(ALL)) for one in trio[:2]]
    wait_until(lambda: has_come(trio[0], 2))
    assert not any(future.done() for future in first)
    last = at(pool, trio[2], lambda: rpc.barrier(ALL))
    assert outcomes([*first, last]) == [None] * 3


def test_the_same_group_gathers_again_and_again(
    trio: list[Agent], pool: ThreadPoolExecutor
) -> None:
    def rounds(one: Agent) -> list[Any]:
        return [rpc.all_gather((one.me.id, number), ALL) for number in range(20)]

    done = [at(pool, one, lambda one=one: rounds(one)) for one in trio]
    for seen in outcomes(done):
        assert seen == [{f"w{i}": (i, number) for i in range(3)} for number in range(20)]


def test_those_that_go_on_at_once_do_not_mix(trio: list[Agent], pool: ThreadPoolExecutor) -> None:
    def gathers(one: Agent, key: str) -> Callable[[], Any]:
        return lambda: rpc.all_gather((one.me.id, key), ALL, key=key)

    keys = ["a", "b", "c"]
    done = {key: [at(pool, one, gathers(one, key)) for one in trio] for key in keys}
    some = [at(pool, one, lambda one=one: rpc.all_gather(one.me.id, ALL[:2])) for one in trio[:2]]
    for key in keys:
        assert outcomes(done[key]) == [{f"w{i}": (i, key) for i in range(3)}] * 3
    assert outcomes(some) == [{"w0": 0, "w1": 1}] * 2


@pytest.mark.parametrize("late", [0, 2])  # the leader, and another
def test_one_that_does_not_come_is_named_to_all(
    trio: list[Agent], pool: ThreadPoolExecutor, late: int
) -> None:
    others = [one for one in trio if one is not trio[late]]

    def is_named(seconds: float) -> bool:
        """Let the others wait for so long. One of them may come too late for the first one."""
        barrier = partial(rpc.barrier, ALL, key=f"{seconds} s", timeout=seconds)
        errors = outcomes([at(pool, one, barrier) for one in others])
        assert all(isinstance(error, RpcTimeout) for error in errors)
        return all(f"missing at its end: 'w{late}'" in str(error) for error in errors)

    seconds = SHORT
    while not is_named(seconds):
        seconds *= 2
        assert seconds < PATIENCE
    same = partial(rpc.barrier, ALL, key=f"{seconds} s", timeout=PATIENCE)
    with pytest.raises(RpcTimeout):  # it hears that the others have given up
        at(pool, trio[late], same).result(PATIENCE)
    again = [at(pool, one, lambda: rpc.barrier(ALL)) for one in trio]
    assert outcomes(again) == [None] * 3


@pytest.mark.parametrize("dies", [0, 2])
def test_all_hear_of_one_that_dies(trio: list[Agent], pool: ThreadPoolExecutor, dies: int) -> None:
    others = [one for one in trio if one is not trio[dies]]
    done = [at(pool, one, lambda: rpc.barrier(ALL, timeout=PATIENCE)) for one in others]
    wait_until(lambda: has_come(trio[0], 2))
    trio[dies].close()
    for error in outcomes(done):
        assert isinstance(error, PeerLost)
        assert error.worker == f"w{dies}"


def test_a_role_gathers(pool: ThreadPoolExecutor) -> None:
    group = OpenGroup()
    try:
        group.join("boss", "boss")
        trainers = [group.join(f"t{number}", "trainer") for number in range(2)]

        def train(one: Agent) -> dict[str, Any]:
            rpc.wait_for(role="trainer", count=2)
            return rpc.all_gather(one.me.name, role="trainer")

        done = [at(pool, one, lambda one=one: train(one)) for one in trainers]
        assert outcomes(done) == [{"t0": "t0", "t1": "t1"}] * 2
        # One of them dies and comes back: they begin anew.
        trainers[1].close()
        trainers[1] = group.join("t1", "trainer")
        done = [at(pool, one, lambda one=one: train(one)) for one in trainers]
        assert outcomes(done) == [{"t0": "t0", "t1": "t1"}] * 2
    finally:
        group.close()


@pytest.mark.usefixtures("trio")
@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (["w1", "w2"], {}),
        (["w0", "w0"], {}),
        ("w0", {}),
        (["w0"], {"role": "trainer"}),
        (None, {"role": "trainer"}),
    ],
)
def test_nonsense_is_refused(workers: Any, more: dict[str, str]) -> None:
    with pytest.raises((TypeError, ValueError)):
        rpc.barrier(workers, **more)


def test_nothing_is_kept(trio: list[Agent], pool: ThreadPoolExecutor) -> None:
    outcomes([at(pool, one, lambda: rpc.barrier(ALL)) for one in trio])
    gatherings = trio[0].group.gatherings
    wait_until(lambda: not gatherings._is_watching)
    assert not gatherings._open
    assert not gatherings._failed
