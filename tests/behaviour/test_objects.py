"""Objects with a name, and their end by force: `remote(name=)`, `get_object`, `kill`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, Box, Deaths, Gate, make_precious, wait_at
from farcall import rpc
from farcall.errors import DuplicateName, Refused, UnknownObject
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def until_cancelled(gate: Gate, ended: Box) -> None:
    gate.announce()
    waiting = threading.Event()
    while not rpc.cancelled():
        waiting.wait(0.005)
    ended.put(rpc.get_worker_info().name)


@rpc.functions.async_execution
def until_cancelled_at_w2(gate: Gate, ended: Box) -> torch.futures.Future[None]:
    return rpc.rpc_async("w2", until_cancelled, args=(gate, ended))


class Buffer:
    def __init__(self, size: int = 0, deaths: Deaths | None = None) -> None:
        self.size = size
        self.precious = None if deaths is None else make_precious(deaths)

    def grow(self, by: int) -> int:
        self.size += by
        return self.size

    def wait(self, gate: Gate) -> int:
        gate.wait()
        return self.size


def size_of_named(name: str) -> int:
    return rpc.get_object(name).rpc_sync().grow(1)  # type: ignore[no-any-return]


def kill_named(name: str) -> None:
    rpc.kill(rpc.get_object(name))


def make(name: str, to: str) -> rpc.RRef[Buffer]:
    return rpc.remote(to, Buffer, name=name)


def test_every_worker_finds_an_object_by_its_name(trio: list[Agent]) -> None:
    made = rpc.remote("w1", Buffer, args=(5,), name="replay", concurrency=1)
    assert made.rpc_sync().grow(0) == 5  # it has its name when it is made
    assert [rpc.rpc_sync(f"w{n}", size_of_named, args=("replay",)) for n in range(3)] == [6, 7, 8]
    assert rpc.get_object("replay").owner_name() == "w1"


def test_name_that_no_worker_has_is_said_to_be_unknown(trio: list[Agent]) -> None:
    with pytest.raises(UnknownObject, match="'replay'"):
        rpc.get_object("replay")


def test_name_in_use_is_refused_wherever_its_object_lives(trio: list[Agent]) -> None:
    first = make("replay", "w1")
    first.rpc_sync().grow(1)
    for to in ("w0", "w1", "w2"):
        with pytest.raises(DuplicateName, match="'replay' is in use"):
            make("replay", to).rpc_sync().grow(1)
    assert first.rpc_sync().grow(1) == 2


def test_of_objects_made_at_once_with_one_name_exactly_one_gets_it(trio: list[Agent]) -> None:
    made = [make("replay", f"w{n % 3}") for n in range(9)]
    outcomes = [reference.rpc_async().grow(1) for reference in made]
    found = 0
    for outcome in outcomes:
        try:
            outcome.wait()
            found += 1
        except DuplicateName:
            pass
    assert found == 1
    assert rpc.get_object("replay").rpc_sync().grow(1) == 2


def test_reference_that_was_got_keeps_the_object(trio: list[Agent]) -> None:
    made = make("replay", "w1")
    made.rpc_sync().grow(1)
    got = rpc.get_object("replay")
    del made
    gc.collect()
    assert rpc.rpc_sync("w2", size_of_named, args=("replay",)) == 2
    assert got.rpc_sync().grow(1) == 3


def test_name_of_a_dropped_object_is_free_again(trio: list[Agent]) -> None:
    deaths = Deaths()
    made = rpc.remote("w1", Buffer, args=(1, deaths), name="replay")
    made.rpc_sync().grow(1)
    del made
    gc.collect()
    deaths.wait_for()
    with pytest.raises(UnknownObject):
        rpc.get_object("replay")
    again = make("replay", "w2")
    again.rpc_sync().grow(1)
    assert rpc.get_object("replay").owner_name() == "w2"


def test_name_of_an_object_that_could_not_be_made_is_free_again(pair: list[Agent]) -> None:
    failed = rpc.remote("w1", Buffer, args=(1, 2, 3), name="replay")
    with pytest.raises(TypeError):
        failed.to_here()
    made = make("replay", "w0")
    made.rpc_sync().grow(1)
    assert rpc.get_object("replay").owner_name() == "w0"


def test_name_whose_owner_died_is_free_again_and_rank_0_is_not_needed(trio: list[Agent]) -> None:
    w0, w1, w2 = trio
    with acting_as(w1):
        made = make("replay", "w0")
        made.rpc_sync().grow(1)
        other = make("other", "w2")
        other.rpc_sync().grow(1)
        w0.close()
        with pytest.raises(UnknownObject):
            rpc.get_object("replay")
        assert rpc.get_object("other").rpc_sync().grow(1) == 2
        again = make("replay", "w1")
        again.rpc_sync().grow(1)
    with acting_as(w2):
        assert rpc.get_object("replay").owner_name() == "w1"


@pytest.mark.parametrize("wrong", ["", "x" * 201, 5, None])
def test_wrong_name_is_refused(pair: list[Agent], wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="name"):
        rpc.get_object(wrong)


def test_killed_object_is_dropped_though_others_hold_references(trio: list[Agent]) -> None:
    deaths = Deaths()
    made = rpc.remote("w1", Buffer, args=(1, deaths), name="replay")
    made.rpc_sync().grow(1)
    rpc.rpc_sync("w2", kill_named, args=("replay",))
    deaths.wait_for()
    uses: Sequence[Callable[[], Any]] = [
        made.to_here,
        made.rpc_sync().grow,
        lambda: made.rpc_async().grow(1).wait(),
        lambda: made.remote().grow(1).to_here(),
    ]
    for use in uses:
        with pytest.raises(rpc.Cancelled, match="was killed by w2"):
            use()
    with pytest.raises(UnknownObject):
        rpc.get_object("replay")
    rpc.kill(made)  # once more: no effect
    make("replay", "w2").rpc_sync().grow(1)


def test_calls_that_wait_for_their_turn_end_when_the_object_is_killed(
    pair: list[Agent], gate: Gate
) -> None:
    made = rpc.remote("w1", Buffer, concurrency=1)
    running = made.rpc_async().wait(gate)
    gate.wait_for_arrivals()
    queued = [made.rpc_async().grow(1) for _ in range(5)]
    rpc.kill(made, timeout=PATIENCE)
    for future in queued:
        with pytest.raises(rpc.Cancelled, match="was killed by w0"):
            future.wait()
    gate.open()
    assert running.wait() == 0


def test_object_is_killed_before_it_is_made_and_by_its_owner(pair: list[Agent], gate: Gate) -> None:
    made = rpc.remote("w1", Gate.wait, args=(gate,))
    own = rpc.RRef(5)
    rpc.kill(made)
    rpc.kill(own)
    with pytest.raises(rpc.Cancelled, match="was killed by w0"):
        made.to_here()
    with pytest.raises(rpc.Cancelled, match="was killed by w0"):
        own.local_value()


@pytest.mark.parametrize("function", [until_cancelled, until_cancelled_at_w2])
def test_function_that_makes_a_killed_object_sees_it_and_so_do_its_calls(
    trio: list[Agent], gate: Gate, function: Callable[..., Any]
) -> None:
    ended = Box()
    made = rpc.remote("w1", function, args=(gate, ended))
    gate.wait_for_arrivals()
    rpc.kill(made)
    assert ended.wait_for() == ["w1" if function is until_cancelled else "w2"]
    with pytest.raises(rpc.Cancelled, match="was killed by w0"):
        made.to_here()


def test_object_that_is_killed_in_the_queue_is_never_made(
    start: Callable[..., list[Agent]],
) -> None:
    gate, box = Gate(), Box()
    start(3, num_worker_threads=2)
    running = [rpc.rpc_async("w1", wait_at, args=(gate,)) for _ in range(2)]
    gate.wait_for_arrivals(2)
    first, second = (rpc.remote("w1", box.put, args=(number,)) for number in range(2))
    rpc.rpc_sync("w2", rpc.kill, args=(first,))  # a caller of its own has a place for one call
    gate.open()
    torch.futures.wait_all(running)
    second.to_here()
    assert box.things == [1]
    with pytest.raises(rpc.Cancelled, match="was killed by w2"):
        first.to_here()


def test_policy_has_to_list_the_functions_for_named_objects(
    start: Callable[..., list[Agent]],
) -> None:
    methods = [Buffer, Buffer.grow]
    policies = {
        "w1": rpc.Only(functions=methods),
        "w2": rpc.Only(functions=[*methods, rpc.get_object, rpc.kill]),
    }
    start(3, policies=policies)
    hidden, open_ = make("hidden", "w1"), make("open", "w2")
    assert hidden.rpc_sync().grow(2) == open_.rpc_sync().grow(2) == 2
    with pytest.raises(UnknownObject):
        rpc.get_object("hidden")
    with pytest.raises(Refused, match="kill"):
        rpc.kill(hidden)
    got = rpc.get_object("open")
    assert got.rpc_sync().grow(1) == 3
    rpc.kill(got)
    with pytest.raises(rpc.Cancelled, match="was killed by w0"):
        open_.to_here()
    with pytest.raises(Refused):
        rpc.remote("w1", torch.nn.Linear, args=(2, 2), name="linear").to_here()
