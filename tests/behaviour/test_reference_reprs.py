"""`repr` of a reference: what it is, and the known state of its value. It asks no worker."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from patience import PATIENCE

from behaviour.helpers import Gate, fail_with, wait_at, wait_until
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

SHAPE = re.compile(
    r"(Owner|User)RRef\(RRefId\(created_on=\w+, local_id=[0-9a-f]{32}\), owner='w\d', (.+)\)"
)


def state_in(rref: rpc.RRef[Any]) -> str:
    found = SHAPE.fullmatch(repr(rref))
    assert found is not None, repr(rref)
    assert (found[1] == "Owner") == rref.is_owner()
    return found[2]


class HostileName(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__", "__module__"):
            raise SystemExit
        return super().__getattribute__(name)

    def __repr__(cls) -> str:
        raise SystemExit


class HostileError(Exception, metaclass=HostileName):
    def __str__(self) -> str:
        raise SystemExit


def raise_hostile() -> None:
    raise HostileError


def test_of_an_owner(pair: list[Agent], gate: Gate) -> None:
    assert state_in(rpc.RRef(5)) == "ready"
    rref = rpc.remote("w0", wait_at, args=(gate,))
    assert state_in(rref) == "not made yet"
    gate.open()
    rref.local_value()
    assert state_in(rref) == "ready"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: fail_with(KeyError("no")), "failed: KeyError"),
        (lambda: fail_with(SystemExit()), "failed: farcall.errors.RemoteError"),
        (raise_hostile, f"failed: {__name__}.HostileError"),
    ],
)
def test_of_an_owner_whose_value_failed(
    pair: list[Agent], function: Callable[[], None], says: str
) -> None:
    rref = rpc.remote("w0", function)
    wait_until(lambda: state_in(rref) != "not made yet")
    assert state_in(rref) == says


def test_of_a_user(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", int, args=(5,))
    assert state_in(rref) in ("confirmed", "not confirmed yet")
    wait_until(rref.confirmed_by_owner)
    assert state_in(rref) == "confirmed"


def test_of_a_user_before_the_owner_has_answered(start: Callable[..., list[Agent]]) -> None:
    agents = start(2)
    references = agents[0].references
    handle, _ = references.create(agents[1].me)  # its request is never sent
    assert state_in(rpc.RRef.of(handle)) == "not confirmed yet"
    late = rpc.RpcTimeout("late")
    references.creation_late(handle.ref, late)
    assert state_in(rpc.RRef.of(handle)) == "failed: farcall.errors.RpcTimeout"


def test_of_a_user_whose_owner_is_gone(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", int, args=(5,))
    rref.to_here()
    wait_until(lambda: state_in(rref) == "confirmed")
    pair[1].close("it was killed")
    wait_until(lambda: state_in(rref) != "confirmed")
    assert state_in(rref) == "owner lost"


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_after_the_agent_was_shut_down(pair: list[Agent], owner: str) -> None:
    rref = rpc.remote(owner, int, args=(5,))
    rref.to_here()
    pair[0].close("it leaves")
    assert state_in(rref) == "shut down"


def test_of_one_that_was_never_made() -> None:
    assert "RRef" in repr(rpc.RRef.__new__(rpc.RRef))


def test_it_takes_no_lock_and_sends_nothing(pair: list[Agent]) -> None:
    """Look as a signal handler does, which may interrupt farcall inside any of its locks."""
    own = rpc.RRef(5)
    other = rpc.remote("w1", int, args=(5,))
    other.to_here()
    sent = []
    agent = pair[0]
    for place in (agent, agent.references, agent.directory):
        for name, value in vars(place).items():
            if name.endswith("lock"):
                value.acquire()
                sent.append(value)
    assert sent, "no lock was found"
    shown: list[str] = []
    try:
        thread = threading.Thread(target=lambda: shown.extend([repr(own), repr(other)]))
        thread.daemon = True
        thread.start()
        thread.join(PATIENCE)
    finally:
        for lock in sent:
            lock.release()
    assert len(shown) == 2


def test_of_one_at_a_third_worker(trio: list[Agent]) -> None:
    rref = rpc.remote("w1", int, args=(5,))
    assert rpc.rpc_sync("w2", repr, args=(rref,)).endswith("confirmed)")
    with acting_as(trio[2]):
        assert state_in(rpc.remote("w2", int)) in ("ready", "not made yet")
