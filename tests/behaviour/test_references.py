"""RRef: where values live, how to reach them, and passing references around."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from behaviour.helpers import (
    PROXIES,
    Account,
    Box,
    Gate,
    echo,
    fail_with,
    wait_at,
    wait_until,
    wait_until_settled,
)
from farcall import rpc
from farcall.errors import InvalidReference
from farcall.runtime.agent import Agent
from farcall.runtime.membership.peers import Peer
from farcall.testing.cluster import acting_as
from farcall.transport.base import Link

Way = Callable[..., Any]
TIMEOUT = 0.005  # seconds
each_proxy = pytest.mark.parametrize("proxy", PROXIES)


class Holder:
    def __init__(self, rref: rpc.RRef[Any]) -> None:
        self.rref = rref


@dataclass
class Record:
    name: str
    rrefs: list[rpc.RRef[Any]] = field(default_factory=list)


def balance_of(rref: rpc.RRef[Account]) -> int:
    return rref.rpc_sync().deposit(0)


def describe(rref: rpc.RRef[Any]) -> tuple[str, bool]:
    return rref.owner_name(), rref.is_owner()


def make_rref(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


def make_rref_on(to: str, value: Any) -> rpc.RRef[Any]:
    return rpc.remote(to, echo, args=(value,))


def local(rref: rpc.RRef[Any]) -> Any:
    return rref.local_value()


def confirmed(rref: rpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def unwrap(thing: Any) -> Any:
    """Values of the references in a nested thing."""
    match thing:
        case rpc.RRef():
            return thing.to_here()
        case Holder():
            return unwrap(thing.rref)
        case Record():
            return unwrap(thing.rrefs)
        case dict():
            return {key: unwrap(value) for key, value in thing.items()}
        case list() | tuple():
            return [unwrap(item) for item in thing]
        case _:
            return thing


# Where a value lives.


def test_a_reference_to_a_value_of_this_worker(pair: list[Agent]) -> None:
    value = Account(5)
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.owner() == rpc.get_worker_info()
    assert rref.owner_name() == "w0"
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert "OwnerRRef" in repr(rref)


def test_a_reference_to_a_value_of_another_worker(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    assert not rref.is_owner()
    assert rref.owner() == rpc.get_worker_info("w1")
    assert rref.owner_name() == "w1"
    assert rref.to_here().balance == 5
    assert rpc.rpc_sync("w1", describe, args=(rref,)) == ("w1", True)
    assert "UserRRef" in repr(rref)


def test_a_reference_to_a_result_on_this_worker(pair: list[Agent]) -> None:
    rref = rpc.remote("w0", Account, args=(5,))
    assert rref.is_owner()
    assert rref.local_value().balance == 5
    assert rref.local_value() is rref.to_here()
    assert rref.confirmed_by_owner()


def test_references_to_one_value_have_equal_owners(trio: list[Agent]) -> None:
    rref = rpc.remote("w1", Account)
    back = rpc.rpc_sync("w2", echo, args=(rref,))
    assert back is not rref
    assert back.owner() == rref.owner()
    assert hash(back.owner()) == hash(rref.owner())
    back.rpc_sync().deposit(5)
    assert rref.rpc_sync().deposit(0) == 5


def test_only_the_owner_has_the_local_value(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    with pytest.raises(InvalidReference, match=r"for its owner, worker 'w1'.*to_here"):
        rref.local_value()
    assert rpc.rpc_sync("w1", local, args=(rref,)).balance == 5


def test_to_here_gives_a_copy(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    rref.to_here().deposit(100)
    assert rref.to_here().balance == 5


def test_confirmation_comes_without_use(pair: list[Agent], gate: Gate) -> None:
    rref = rpc.remote("w1", wait_at, args=(gate, 5))  # the function runs on
    assert rpc.rpc_sync("w1", confirmed, args=(rref,))
    wait_until(rref.confirmed_by_owner)
    gate.open()
    assert rref.to_here() == 5


def test_the_type_of_a_value_can_be_asked(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    assert rref._get_type() is Account
    assert rref._get_type(blocking=False).wait() is Account


# Values that are not ready.


def test_remote_returns_before_the_function_ends(pair: list[Agent], gate: Gate) -> None:
    rref = rpc.remote("w1", wait_at, args=(gate, 5))
    gate.wait_for_arrivals()
    values = [rpc.rpc_async("w1", local, args=(rref,)) for _ in range(3)]
    with pytest.raises(rpc.RpcTimeout):
        rref.to_here(timeout=0.05)
    gate.open()
    assert rref.to_here() == 5
    assert torch.futures.wait_all(values) == [5] * 3


def test_a_reference_is_made_however_long_its_link_takes_to_open(
    pair: list[Agent], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = pair[0].links.connect

    def connect_late(peer: Peer, deadline: float) -> Link:
        begun = time.monotonic()
        assert deadline - begun > 100 * TIMEOUT
        while time.monotonic() < begun + 2 * TIMEOUT:  # until the call is late
            pass
        return connect(peer, deadline)

    monkeypatch.setattr(pair[0].links, "connect", connect_late)
    rref = rpc.remote("w1", wait_at, args=(gate, 5), timeout=TIMEOUT)
    monkeypatch.undo()
    gate.wait_for_arrivals()
    gate.open()
    wait_until(rref.confirmed_by_owner)
    assert rref.to_here() == 5


@each_proxy
def test_methods_wait_for_the_value(pair: list[Agent], gate: Gate, proxy: Way) -> None:
    rref = rpc.remote("w1", make_account_late, args=(gate, 5))
    call = rref.rpc_async().deposit(1)
    gate.wait_for_arrivals()
    assert not call.done()
    gate.open()
    assert call.wait() == 6
    assert proxy(rref, "deposit", 1) == 7


def make_account_late(gate: Gate, balance: int) -> Account:
    gate.wait()
    return Account(balance)


def test_the_owner_waits_for_its_own_value(pair: list[Agent], gate: Gate) -> None:
    rref = rpc.remote("w0", wait_at, args=(gate, 5))
    with pytest.raises(rpc.RpcTimeout):
        rref.to_here(timeout=0.05)
    gate.open()
    assert rref.local_value() == 5


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_a_function_that_raised_raises_at_every_use(pair: list[Agent], to: str) -> None:
    rref = rpc.remote(to, fail_with, args=(KeyError("no value"),))
    for _ in range(2):
        with pytest.raises(KeyError, match="no value"):
            rref.to_here()
        for proxy in PROXIES:
            with pytest.raises(KeyError, match="no value"):
                proxy(rref, "deposit", 1)
    with pytest.raises(KeyError, match="no value"):
        rpc.rpc_sync(to, local, args=(rref,))


def test_raising_again_and_again_does_not_grow_the_traceback(pair: list[Agent]) -> None:
    rref = rpc.remote("w0", fail_with, args=(KeyError("no value"),))

    def depth() -> int:
        with pytest.raises(KeyError) as raised:
            rref.local_value()
        return len(raised.traceback)

    assert len({depth() for _ in range(5)}) == 1


# Passing them around.


@pytest.mark.parametrize("owner", ["w0", "w1", "w2"])
def test_a_reference_can_be_an_argument(trio: list[Agent], owner: str) -> None:
    rref = rpc.remote(owner, Account, args=(5,))
    for to in range(3):
        assert rpc.rpc_sync(to, balance_of, args=(rref,)) == 5
        assert rpc.rpc_async(to, balance_of, kwargs={"rref": rref}).wait() == 5
        assert rpc.remote(to, balance_of, args=(rref,)).to_here() == 5
        assert rpc.rpc_sync(to, describe, args=(rref,)) == (owner, f"w{to}" == owner)


@pytest.mark.parametrize("owner", ["w0", "w1", "w2"])
def test_a_reference_can_be_a_result(trio: list[Agent], owner: str) -> None:
    rref = rpc.rpc_sync("w1", make_rref_on, args=(owner, 5))
    assert describe(rref) == (owner, owner == "w0")
    assert rref.to_here() == 5
    assert rpc.rpc_async("w1", make_rref_on, args=(owner, 6)).wait().to_here() == 6
    assert rpc.remote("w1", make_rref_on, args=(owner, 7)).to_here().to_here() == 7
    assert rpc.rpc_sync("w2", make_rref, args=(8,)).to_here() == 8


def test_references_travel_nested_in_anything(trio: list[Agent]) -> None:
    one, two, three = rpc.RRef(1), rpc.remote("w1", echo, args=(2,)), make_rref_on("w2", 3)
    nested = {"a": [one, Holder(two)], "b": (Record("r", [three, one]), {"c": one}, "plain")}
    values = {"a": [1, 2], "b": [[3, 1], {"c": 1}, "plain"]}
    for to in range(3):
        assert rpc.rpc_sync(to, unwrap, args=(nested,)) == values
        assert unwrap(rpc.rpc_sync(to, echo, args=(nested,))) == values
        assert unwrap(rpc.remote(to, echo, args=(nested,)).to_here()) == values


def test_a_reference_can_be_in_a_closure_and_a_method(trio: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    assert rpc.rpc_sync("w2", lambda: rref.rpc_sync().deposit(0)) == 5
    assert rpc.rpc_sync("w2", rref.to_here).balance == 5


def test_a_reference_can_be_in_an_exception(trio: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    with pytest.raises(KeyError) as raised:
        rpc.rpc_sync("w2", fail_with, args=(KeyError(rref),))
    assert raised.value.args[0].rpc_sync().deposit(1) == 6


def test_a_value_can_be_a_reference(trio: list[Agent]) -> None:
    inner = rpc.remote("w1", echo, args=(5,))
    outer = rpc.remote("w2", echo, args=(inner,))
    assert outer.to_here().to_here() == 5
    assert rpc.RRef(rpc.RRef(6)).to_here().to_here() == 6


def test_a_reference_goes_round_all_workers(start: Callable[..., list[Agent]]) -> None:
    start(4)
    rref = rpc.remote("w1", Account)
    for to in [2, 3, 0, 1, 2, 1, 3] * 3:
        rref = rpc.rpc_sync(to, echo, args=(rref,))
    assert rref.rpc_sync().deposit(5) == 5


def test_a_fresh_reference_can_be_passed_on_at_once(trio: list[Agent], gate: Gate) -> None:
    for number in range(20):  # its creation need not be confirmed
        rref = rpc.remote("w1", echo, args=(number,))
        assert rpc.rpc_sync("w2", unwrap, args=(rref,)) == number


def test_many_references_at_once(trio: list[Agent]) -> None:
    rrefs = [rpc.remote(1 + i % 2, Account, args=(i,)) for i in range(200)]
    futures = [rpc.rpc_async(1 + i % 3 % 2, balance_of, args=(r,)) for i, r in enumerate(rrefs)]
    assert torch.futures.wait_all(futures) == list(range(200))
    assert rpc.rpc_sync("w2", len, args=(rrefs,)) == 200
    del rrefs, futures
    wait_until_settled(*trio)


def test_outside_of_calls_references_can_not_be_pickled(pair: list[Agent]) -> None:
    for rref in (rpc.RRef(1), rpc.remote("w1", echo, args=(1,))):
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
                attempt(rref)


def test_a_reference_of_another_agent_is_refused(pair: list[Agent]) -> None:
    rref = rpc.RRef(1)
    with acting_as(pair[1]), pytest.raises(RuntimeError, match="agent 'w0' can't be sent"):
        rpc.rpc_sync("w0", echo, args=(rref,))
    assert rref.to_here() == 1


def test_a_local_value_need_not_be_picklable(pair: list[Agent]) -> None:
    box = Box()
    rref = rpc.RRef(lambda: box.put("called"))
    rpc.rpc_sync("w1", call_referenced, args=(rref,))
    assert box.wait_for() == ["called"]


def call_referenced(rref: rpc.RRef[Any]) -> None:
    rref.rpc_sync().__call__()


def test_an_attribute_of_the_value_is_none_of_the_reference(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Account)
    with pytest.raises(AttributeError, match=r"'RRef' .* rref\.rpc_sync\(\)\.deposit\("):
        rref.deposit(1)  # type: ignore[attr-defined]
    assert not hasattr(rref, "__array__")
    with pytest.raises(AttributeError, match=r"^'RRef' object has no attribute '_balance'$"):
        _ = rref._balance  # type: ignore[attr-defined]
