"""The reference protocol in running workers: values live as long as references, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from behaviour.helpers import (
    Box,
    Deaths,
    Gate,
    by_async,
    by_sync,
    echo,
    make_precious,
    until_begun,
    wait_at,
    wait_until_settled,
)
from farcall import rpc
from farcall.errors import Refused
from farcall.runtime.agent import Agent
from farcall.serde import Only
from farcall.testing.cluster import acting_as

kept: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _nothing_kept() -> Any:
    yield
    kept.clear()


def keep(name: str, thing: Any) -> None:
    kept[name] = thing


def discard(name: str) -> None:
    del kept[name]


def content_of(rref: rpc.RRef[Any]) -> Any:
    return rref.rpc_sync().get()


def content_after(gate: Gate, rref: rpc.RRef[Any]) -> Any:
    gate.wait()
    return rref.rpc_sync().get()


def make_rref(deaths: Deaths) -> rpc.RRef[Any]:
    return rpc.RRef(deaths.make("value"))


def pass_on(to: str, gate: Gate, rref: rpc.RRef[Any]) -> rpc.Future[Any]:
    """Sends the reference to another worker, and itself lets go of it."""
    kept["call"] = rpc.rpc_async(to, content_after, args=(gate, rref))
    return None


@pytest.fixture
def deaths() -> Deaths:
    return Deaths()


def is_alive(agent: Agent, deaths: Deaths) -> bool:
    """Return whether the value is still there, after everything on its way has arrived."""
    wait_until_settled(agent)
    return deaths.count == 0


def test_the_value_goes_with_the_last_reference_ref_2(pair: list[Agent], deaths: Deaths) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    assert content_of(rref) == "value"
    assert deaths.count == 0
    del rref
    assert deaths.wait_for() == ["value"]
    wait_until_settled(*pair)


def test_an_unused_reference_lets_go_too_ref_2(pair: list[Agent], deaths: Deaths) -> None:
    for number in range(20):
        rpc.remote("w1", make_precious, args=(deaths, number))
    assert sorted(deaths.wait_for(20)) == list(range(20))
    wait_until_settled(*pair)
    assert pair[0].references.statistics()["held"] == 0
    assert pair[1].references.statistics()["owned"] == 0


def test_own_references_let_go_ref_2(pair: list[Agent], deaths: Deaths) -> None:
    rref = rpc.RRef(deaths.make("local"))
    del rref
    deaths.wait_for(1)
    rref = rpc.remote("w0", make_precious, args=(deaths, "to itself"))
    assert rref.local_value().get() == "to itself"
    del rref
    assert deaths.wait_for(2) == ["local", "to itself"]


def test_a_result_by_reference_lets_go_ref_2(pair: list[Agent], deaths: Deaths) -> None:
    rref = rpc.rpc_sync("w1", make_rref, args=(deaths,))
    assert content_of(rref) == "value"
    del rref
    deaths.wait_for()


def test_a_result_by_reference_that_no_caller_takes_lets_go_ref_2(
    pair: list[Agent], deaths: Deaths
) -> None:
    rpc.rpc_async("w1", make_rref, args=(deaths,))
    deaths.wait_for()
    wait_until_settled(*pair)


def test_any_holder_keeps_the_value_ref_1(trio: list[Agent], deaths: Deaths) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    rpc.rpc_sync("w2", keep, args=("it", rref))
    del rref
    wait_until_settled(*trio)
    assert deaths.count == 0
    assert rpc.rpc_sync("w2", use_kept, args=("it",)) == "value"
    rpc.rpc_sync("w2", discard, args=("it",))
    deaths.wait_for()


def use_kept(name: str) -> Any:
    return content_of(kept[name])


def test_the_owner_itself_can_keep_the_value_ref_1(pair: list[Agent], deaths: Deaths) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    rpc.rpc_sync("w1", keep, args=("it", rref))
    del rref
    wait_until_settled(*pair)
    assert deaths.count == 0
    rpc.rpc_sync("w1", discard, args=("it",))
    deaths.wait_for()


@pytest.mark.parametrize("owner", ["w0", "w1", "w2"])
def test_a_reference_in_a_queued_call_keeps_the_value_ref_1(
    start: Callable[..., list[Agent]], gate: Gate, deaths: Deaths, owner: str
) -> None:
    agents = start(3, num_worker_threads=1)
    blocking = rpc.rpc_async("w2", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    rref = rpc.remote(owner, make_precious, args=(deaths, "value")) if owner != "w2" else None
    if rref is None:  # w2 has no free thread: its value is made before
        return
    call = rpc.rpc_async("w2", content_of, args=(rref,))
    del rref
    assert deaths.count == 0
    gate.open()
    assert call.wait() == "value"
    blocking.wait()
    deaths.wait_for()
    wait_until_settled(*agents)


def test_a_reference_in_a_running_call_keeps_the_value_ref_1(
    trio: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    call = rpc.rpc_async("w2", content_after, args=(gate, rref))
    del rref
    gate.wait_for_arrivals()
    wait_until_settled(*trio)
    assert deaths.count == 0
    gate.open()
    assert call.wait() == "value"
    deaths.wait_for()


def test_a_reference_passed_on_keeps_the_value_ref_1(
    trio: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    rref = rpc.RRef(deaths.make("value"))
    rpc.rpc_sync("w1", pass_on, args=("w2", gate, rref))
    del rref
    gate.wait_for_arrivals()
    wait_until_settled(*trio)
    assert deaths.count == 0
    gate.open()
    assert kept.pop("call").wait() == "value"
    deaths.wait_for()


def test_a_reference_inside_a_value_keeps_the_other_value_ref_1(
    trio: list[Agent], deaths: Deaths
) -> None:
    inner = rpc.remote("w1", make_precious, args=(deaths, "inner"))
    outer = rpc.remote("w2", make_precious, args=(deaths, inner))
    del inner
    wait_until_settled(*trio)
    assert deaths.count == 0
    assert content_of(rpc.rpc_sync("w2", inner_of, args=(outer,))) == "inner"
    del outer
    deaths.wait_for(2)


def inner_of(outer: rpc.RRef[Any]) -> Any:
    return outer.local_value().get()


def test_a_value_that_is_being_made_can_be_let_go_ref_2(
    pair: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    rref = rpc.remote("w1", make_late, args=(gate, deaths))
    gate.wait_for_arrivals()
    del rref
    wait_until_settled(*pair)
    gate.open()
    assert deaths.wait_for() == ["late"]


def make_late(gate: Gate, deaths: Deaths) -> Any:
    gate.wait()
    return deaths.make("late")


def test_values_end_once_ref_4(trio: list[Agent], deaths: Deaths) -> None:
    rrefs = [rpc.remote("w1", make_precious, args=(deaths, number)) for number in range(30)]
    for to in ("w2", "w1", "w0"):
        for way in (by_sync, by_async):
            assert len(way(to, echo, (rrefs,))) == 30
    del rrefs
    assert sorted(deaths.wait_for(30)) == list(range(30))
    wait_until_settled(*trio)
    assert deaths.count == 30


def test_a_call_that_can_not_be_sent_keeps_nothing_ref_2(pair: list[Agent], deaths: Deaths) -> None:
    rref = rpc.RRef(deaths.make("value"))
    with pytest.raises(TypeError, match="argument 1"):
        rpc.rpc_sync("w1", echo, args=(rref, deaths.__init__.__self__._box._filled))
    del rref
    deaths.wait_for()
    wait_until_settled(*pair)


def test_a_call_that_timed_out_keeps_nothing_ref_2(
    trio: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    with pytest.raises(rpc.RpcTimeout):
        rpc.rpc_sync("w2", content_after, args=(gate, rref), timeout=0.05)
    del rref
    gate.open()
    deaths.wait_for()
    wait_until_settled(*trio)


def test_a_call_cancelled_in_the_queue_keeps_nothing_ref_2(
    start: Callable[..., list[Agent]], gate: Gate, deaths: Deaths
) -> None:
    trio = start(3, num_worker_threads=1)
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    busy = rpc.rpc_async("w2", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    with pytest.raises(rpc.RpcTimeout):
        rpc.rpc_sync("w2", content_of, args=(rref,), timeout=0.05)
    del rref
    gate.open()
    busy.wait()
    deaths.wait_for()
    wait_until_settled(*trio)


def test_a_call_that_is_refused_keeps_nothing_ref_2(
    start: Callable[..., list[Agent]], deaths: Deaths
) -> None:
    trio = start(3, policies={"w2": Only([make_precious])})
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    with pytest.raises(Refused):
        rpc.rpc_sync("w2", content_of, args=(rref,))
    del rref
    deaths.wait_for()
    wait_until_settled(*trio)


def test_a_late_result_by_reference_keeps_nothing_ref_2(
    pair: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    def attempt(seconds: float) -> None:
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", make_rref_late, args=(gate, deaths), timeout=seconds)

    until_begun(gate, attempt, 0.05)
    gate.open()
    deaths.wait_for()
    wait_until_settled(*pair)


def make_rref_late(gate: Gate, deaths: Deaths) -> rpc.RRef[Any]:
    gate.wait()
    return rpc.RRef(deaths.make("late"))


def test_a_holder_that_dies_lets_go_ref_3(trio: list[Agent], deaths: Deaths) -> None:
    with acting_as(trio[2]):
        rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
        assert content_of(rref) == "value"
    trio[2].close()
    deaths.wait_for()
    del rref


def test_a_sender_that_dies_takes_no_value_with_it_ref_3(
    trio: list[Agent], gate: Gate, deaths: Deaths
) -> None:
    with acting_as(trio[2]):
        rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
        rpc.rpc_sync("w0", keep, args=("it", rref))
    trio[2].close()
    assert content_of(kept["it"]) == "value"
    assert deaths.count == 0
    kept.clear()
    deaths.wait_for()
    del rref


def test_a_reference_whose_owner_died_says_so(trio: list[Agent], deaths: Deaths) -> None:
    rref = rpc.remote("w1", make_precious, args=(deaths, "value"))
    assert content_of(rref) == "value"
    lost = Box()
    call = rref.rpc_async().get
    trio[1].close()
    while not lost.things:
        try:
            call().wait()
        except rpc.PeerLost as error:
            lost.put(error)
    for use in (rref.to_here, rref.rpc_sync().get, rref.remote().get):
        with pytest.raises(rpc.OwnerDied, match="'w1'"):
            use()
    with pytest.raises(rpc.OwnerDied, match="'w1'"):
        rpc.rpc_sync("w2", echo, args=(rref,))
