"""Processes die or stop: every call that waits for one ends at once, and with the right outcome."""

from __future__ import annotations

import gc
import operator
import os
import signal
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest
from crew import PATIENCE, Crew, call, check_all_left, leave, leave_all

from farcall import rpc

_arrived = threading.Semaphore(0)
_never = threading.Event()
_kept: dict[str, Any] = {}


def wait_for_ever() -> None:
    _arrived.release()
    _never.wait()


def wait_until_called(times: int) -> None:
    """Wait until the process has begun to run `wait_for_ever` so often."""
    for _ in range(times):
        assert _arrived.acquire(timeout=PATIENCE)


# Calls in flight.


def begin_calls(to: str, count: int) -> int:
    _kept["futures"] = [rpc.rpc_async(to, wait_for_ever) for _ in range(count)]
    return len(_kept["futures"])


def outcomes() -> dict[str, int]:
    """Return the ends of the calls."""
    kinds: Counter[str] = Counter()
    for future in _kept["futures"]:
        try:
            future.wait()
        except rpc.PeerLost as error:
            kinds[f"PeerLost {error.worker}"] += 1
        except Exception as error:
            kinds[type(error).__name__] += 1
        else:
            kinds["value"] += 1
    return dict(kinds)


def test_sigkill_of_a_callee_ends_a_thousand_calls_in_flight_in_peer_lost(crew: Crew) -> None:
    caller, callee = crew.group(2, rpc_timeout=PATIENCE)
    assert caller.run(begin_calls, "w1", 1000) == 1000
    callee.run(wait_until_called, 16)  # as many run at once; the others wait for a place
    start = time.monotonic()
    callee.kill()
    kinds = caller.run(outcomes)
    seconds = time.monotonic() - start
    print(f"\n1000 calls in flight ended {seconds * 1000:.0f} ms after SIGKILL")
    assert kinds == {"PeerLost w1": 1000}
    assert seconds < PATIENCE / 2
    leave_all(caller)


def test_sigkill_in_the_middle_of_a_stream_of_calls_loses_none(crew: Crew) -> None:
    caller, callee = crew.group(2)
    caller.start(call_until_lost, "w1")
    callee.run(wait_until_called, 200)
    callee.kill()
    kinds = caller.result()
    assert set(kinds) <= {"value", "PeerLost"}
    assert kinds["PeerLost"] >= 1
    assert kinds["value"] >= 100
    leave_all(caller)


def note_call() -> None:
    _arrived.release()


def call_until_lost(to: str) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    while not kinds["PeerLost"]:
        futures = [rpc.rpc_async(to, note_call) for _ in range(50)]
        for future in futures:
            try:
                future.wait()
                kinds["value"] += 1
            except rpc.PeerLost:
                kinds["PeerLost"] += 1
    return dict(kinds)


def test_sigkill_ends_a_synchronous_call(crew: Crew) -> None:
    caller, callee = crew.group(2)
    caller.start(call, "w1", wait_for_ever, timeout=0)
    callee.run(wait_until_called, 1)
    callee.kill()
    error = caller.fails()
    assert type(error) is rpc.PeerLost
    assert error.worker == "w1"
    caller.start(call, "w1", wait_for_ever)
    assert type(caller.fails()) is rpc.PeerLost  # and so does the next one
    leave_all(caller)


def call_nested(to: str) -> None:
    rpc.rpc_sync(to, wait_for_ever, timeout=0)


def test_death_at_the_end_of_a_chain_of_calls_reaches_its_beginning(crew: Crew) -> None:
    first, second, third = crew.group(3)
    first.start(call, "w1", call_nested, "w2", timeout=0)
    third.run(wait_until_called, 1)
    third.kill()
    error = first.fails()
    assert type(error) is rpc.PeerLost
    assert error.worker == "w2"
    leave_all(first, second)


def test_dead_worker_is_no_trouble_for_calls_between_others(crew: Crew) -> None:
    first, second, third = crew.group(3)
    first.run(call, "w2", os.getpid)
    second.run(call, "w2", os.getpid)
    third.kill()
    for one, other in ((first, second), (second, first)):
        assert one.run(call, other.name, operator.add, 1, 2) == 3
    leave_all(first, second)


# References.


class Value:
    pass


def make_value() -> Value:
    value = Value()
    _kept["value"] = weakref.ref(value, lambda _: _kept["dropped"].set())
    return value


def expect_drop() -> None:
    _kept["dropped"] = threading.Event()


def is_dropped() -> bool:
    gc.collect()
    return bool(_kept["dropped"].is_set())


def wait_for_drop() -> bool:
    return bool(_kept["dropped"].wait(PATIENCE))


def hold(owner: str) -> bool:
    rref = _kept["rref"] = rpc.remote(owner, make_value)
    rref.rpc_sync().__hash__()  # it has been made
    return rpc.rpc_sync(owner, is_dropped)


def use_rref() -> Any:
    return _kept["rref"].to_here()


def test_sigkill_of_an_owner_makes_its_references_raise(crew: Crew) -> None:
    holder, owner = crew.group(2)
    owner.run(expect_drop)
    assert holder.run(hold, "w1") is False
    owner.kill()
    holder.start(use_rref)
    error = holder.fails()
    assert isinstance(error, rpc.PeerLost)
    assert error.worker == "w1"
    holder.start(use_rref)
    assert isinstance(holder.fails(), rpc.PeerLost)  # OwnerDied, as soon as all is sorted out
    leave_all(holder)


def test_sigkill_of_the_last_holder_drops_the_value(crew: Crew) -> None:
    owner, holder = crew.group(2)
    owner.run(expect_drop)
    assert holder.run(hold, "w0") is False
    assert owner.run(is_dropped) is False
    holder.kill()
    assert owner.run(wait_for_drop)
    leave_all(owner)


def forward_rref(to: str) -> None:
    rpc.rpc_sync(to, keep_rref, args=(_kept["rref"],))


def keep_rref(rref: rpc.RRef[Value]) -> None:
    _kept["rref"] = rref


def test_sigkill_of_one_of_two_holders_leaves_the_value_to_the_other(crew: Crew) -> None:
    owner, first, second = crew.group(3)
    owner.run(expect_drop)
    first.run(hold, "w0")
    first.run(forward_rref, "w2")
    first.kill()
    assert type(second.run(use_rref)).__name__ == "Value"
    assert owner.run(is_dropped) is False
    second.kill()
    assert owner.run(wait_for_drop)
    leave_all(owner)


# Processes that stop for a while.


def test_stopped_peer_is_a_timeout_and_works_again_when_it_goes_on(crew: Crew) -> None:
    caller, callee = crew.group(2)
    assert caller.run(call, "w1", operator.add, 1, 2) == 3
    callee.stop()
    caller.start(call, "w1", operator.add, 1, 2, timeout=0.3)
    assert type(caller.fails()) is rpc.RpcTimeout
    caller.start(call_in_vain, "w1", 20)
    assert caller.result() == {"RpcTimeout": 20}
    callee.signal(signal.SIGCONT)
    assert caller.run(call, "w1", operator.add, 1, 2) == 3
    assert callee.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(caller, callee)


def call_in_vain(to: str, times: int) -> dict[str, int]:
    futures = [rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0.2) for _ in range(times)]
    kinds: Counter[str] = Counter()
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            kinds[type(error).__name__] += 1
    return dict(kinds)


def test_first_call_to_a_stopped_peer_is_a_timeout_too(crew: Crew) -> None:
    caller, callee = crew.group(2)
    callee.stop()  # there is no link yet
    caller.start(call, "w1", operator.add, 1, 2, timeout=0.3)
    assert type(caller.fails()) is rpc.RpcTimeout
    callee.signal(signal.SIGCONT)
    assert caller.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(caller, callee)


def send_much(to: str, size: int) -> dict[str, int]:
    data = bytes(size)
    kinds: Counter[str] = Counter()
    for _ in range(4):
        try:
            rpc.rpc_sync(to, len, args=(data,), timeout=0.3)
        except Exception as error:
            kinds[type(error).__name__] += 1
    return dict(kinds)


def test_large_calls_to_a_stopped_peer_are_timeouts_and_later_ones_arrive(crew: Crew) -> None:
    caller, callee = crew.group(2)
    assert caller.run(call, "w1", operator.add, 1, 2) == 3
    callee.stop()
    assert caller.run(send_much, "w1", 30_000_000) == {"RpcTimeout": 4}
    callee.signal(signal.SIGCONT)
    assert caller.run(call, "w1", len, b"x" * 100) == 100
    leave_all(caller, callee)


# Leaving while others die.


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_graceful_shutdown_does_not_wait_for_the_dead(crew: Crew, victim: int) -> None:
    members = crew.group(3)
    for member in members:
        for other in members:
            member.run(call, other.name, os.getpid)
    dead = members.pop(victim)
    for member in members:
        member.start(leave)
    dead.kill()
    for member in members:
        member.result()
    check_all_left(*members)


@pytest.mark.parametrize("victim", [0, 1])
def test_graceful_shutdown_does_not_wait_for_the_dead_that_no_worker_called(
    crew: Crew, victim: int
) -> None:
    members = crew.group(3)
    dead = members.pop(victim)
    dead.kill()
    leave_all(*members)
    check_all_left(*members)


def test_shutdown_that_is_not_graceful_ends_calls_elsewhere_in_peer_lost(crew: Crew) -> None:
    caller, callee = crew.group(2)
    caller.start(call, "w1", wait_for_ever, timeout=0)
    callee.run(wait_until_called, 1)
    callee.start(leave, graceful=False)
    error = caller.fails()
    assert type(error) is rpc.PeerLost
    callee.result()
    leave_all(caller)


def test_shutdown_that_is_not_graceful_cancels_own_calls(crew: Crew) -> None:
    caller, callee = crew.group(2)
    caller.run(begin_calls, "w1", 20)
    callee.run(wait_until_called, 16)
    caller.run(leave, graceful=False)
    assert caller.run(outcomes) == {"Cancelled": 20}
    callee.kill()


def test_shutdown_with_a_timeout_names_the_missing_workers(crew: Crew) -> None:
    ready, late = crew.group(2)
    ready.start(leave, timeout=0.5)
    error = ready.fails()
    assert type(error) is rpc.RpcTimeout
    assert "'w1'" in str(error)
    leave_all(late)  # the one that gave up is not waited for


def test_shutdown_with_a_timeout_ends_also_if_the_first_worker_is_silent(crew: Crew) -> None:
    leader, ready = crew.group(2)
    leader.stop()  # there is no link yet
    ready.start(leave, timeout=0.5)
    error = ready.fails()
    assert type(error) is rpc.RpcTimeout
    assert "'w0'" in str(error)
    leader.signal(signal.SIGCONT)
    leave_all(leader)


def hold_up(value: str) -> str:
    _arrived.release()
    assert _kept["go on"].wait(PATIENCE)
    return value


def prepare() -> None:
    _kept["go on"] = threading.Event()


def go_on() -> None:
    _kept["go on"].set()


def call_later(to: str) -> None:
    _kept["future"] = rpc.rpc_async(to, hold_up, args=("answer",))


def call_leaves_with_answer() -> str:
    rpc.shutdown()
    return str(_kept["future"].value())


def test_graceful_shutdown_waits_for_calls_in_flight(crew: Crew) -> None:
    caller, callee, helper = crew.group(3)
    callee.run(prepare)
    caller.run(call_later, "w1")
    callee.run(wait_until_called, 1)
    caller.start(call_leaves_with_answer)
    callee.start(leave)
    helper.run(call, "w1", go_on)
    helper.start(leave)
    assert caller.result() == "answer"
    callee.result()
    helper.result()
