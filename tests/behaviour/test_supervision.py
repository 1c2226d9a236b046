"""Supervised objects: they are made again when their worker is gone, and references follow."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE
from farcall import rpc
from farcall.errors import DuplicateName, Refused, UnknownObject, UnknownWorker
from farcall.protocol import leading
from farcall.runtime.agent import Agent
from farcall.supervision.handlers import supervisors_of
from farcall.testing.cluster import acting_as

SOON = 0.05  # seconds between snapshots


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def dump(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"] + 1000


_failures: list[str] = []  # names of objects that can't be made


def make_unless(name: str) -> Counter:
    if name in _failures:
        raise LookupError(f"{name} can't be made")
    return Counter()


def snapshots_of(agent: Agent, name: str) -> Any:
    """Return the last snapshot of an object that an agent keeps."""
    supervisors = supervisors_of(agent)
    state = supervisors.state_of(name)
    found = None if state is None else supervisors.snapshots.get(state.key, 0)
    return None if found is None else found[1]


def wait_until(is_so: Any) -> None:
    """Wait for something that no event tells of."""
    over = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if is_so():
            return
        over.wait(0.01)
    raise AssertionError("it never came to be")


def owner_after_restart(follower: Any) -> str:
    """Use the object, and say where it is."""
    follower.rpc_sync(retry=5).add(0)
    return follower.owner_name()  # type: ignore[no-any-return]


def test_object_is_made_again_on_another_worker_and_following_references_lead_there(
    trio: list[Agent],
) -> None:
    follower = rpc.supervise(Counter, (5,), on="w1", name="counter", follow=True)
    plain = rpc.get_object("counter")
    assert follower.rpc_sync().add() == 6
    assert follower.owner_name() == "w1"
    trio[1].close()
    assert follower.rpc_sync(retry=5).add() == 6
    assert follower.owner_name() == "w2"
    with pytest.raises(rpc.OwnerDied, match="w1"):
        plain.rpc_sync().add()
    assert rpc.get_object("counter").rpc_sync().add() == 7


def test_reference_that_did_not_ask_does_not_follow(trio: list[Agent]) -> None:
    plain = rpc.supervise(Counter, on="w1", name="counter")
    assert plain.rpc_sync().add() == 1
    trio[1].close()
    assert owner_after_restart(rpc.get_object("counter", follow=True)) == "w2"
    for use in (plain.to_here, plain.rpc_sync().add, plain.remote().add):
        with pytest.raises(rpc.OwnerDied):
            use()


@pytest.mark.parametrize("kind", ["copy", "methods", "dict"])
def test_object_is_made_from_its_last_snapshot(trio: list[Agent], kind: str) -> None:
    snapshot: Any = {"copy": SOON, "methods": rpc.Snapshot(SOON, "dump", "load")}.get(kind)
    factory: Any = Counter
    if kind == "dict":
        factory, snapshot = torch.nn.Linear, rpc.Snapshot(SOON, "state_dict", "load_state_dict")
    args = (2, 2) if kind == "dict" else ()
    follower = rpc.supervise(
        factory, args, on="w1", name="it", snapshot=snapshot, concurrency=1, follow=True
    )
    if kind == "dict":
        before = follower.rpc_sync().state_dict()
        wait_until(lambda: snapshots_of(trio[0], "it") is not None)
        trio[1].close()
        assert torch.equal(follower.rpc_sync(retry=5).state_dict()["weight"], before["weight"])
        return
    follower.rpc_sync().add(7)
    kept = {"copy": lambda kept: kept.count, "methods": lambda kept: kept["count"]}[kind]
    wait_until(lambda: (got := snapshots_of(trio[0], "it")) is not None and kept(got) == 7)
    trio[1].close()
    assert follower.rpc_sync(retry=5).add() == (8 if kind == "copy" else 1008)


_dumps: list[int] = []


class Undumpable(Counter):
    def dump(self) -> dict[str, int]:
        _dumps.append(self.count)
        raise ValueError("it can't be saved")


def test_snapshot_that_fails_again_and_again_is_told_of_once(
    pair: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    _dumps.clear()
    snapshot = rpc.Snapshot(SOON, "dump", "load")
    rpc.supervise(Undumpable, on="w1", name="it", snapshot=snapshot)
    wait_until(lambda: len(_dumps) >= 5)
    [line] = [one for one in caplog.messages if "no snapshot of 'it'" in one]
    assert "it can't be saved" in line


def test_supervisor_that_dies_is_replaced(start: Any) -> None:
    w0, w1, w2, w3 = start(4)
    with acting_as(w1):
        mine = rpc.get_object
        with acting_as(w0):
            rpc.supervise(Counter, (5,), on="w2", name="counter", snapshot=SOON)
        follower = mine("counter", follow=True)
        follower.rpc_sync().add(2)
        wait_until(lambda: getattr(snapshots_of(w1, "counter"), "count", 0) == 7)
        w0.close()
        w2.close()
        assert follower.rpc_sync(retry=5).add() == 8
        assert follower.owner_name() == "w3"
    with acting_as(w3):
        assert rpc.get_object("counter", follow=True).rpc_sync().add() == 9


def has_plan(agent: Agent) -> bool:
    """Return whether an agent could supervise."""
    return any(known.plan is not None for known in supervisors_of(agent)._all())


def fail_to_adopt(agent: Agent, error: Exception, times: int) -> None:
    """Have an agent fail to keep a plan, so many times."""
    supervisors = supervisors_of(agent)
    adopt, left = supervisors.adopt, [error] * times

    def adopt_later(*args: Any) -> Any:
        if left:
            raise left.pop()
        return adopt(*args)

    supervisors.adopt = adopt_later  # type: ignore[method-assign]


@pytest.mark.parametrize("failures", range(3))
def test_supervise_returns_when_another_worker_could_take_over(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(leading, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(leading, "ADOPTION_SECONDS", 0.0)
    w0, *others = trio
    for agent in others:
        fail_to_adopt(agent, rpc.OwnerDied("w9", "it has not been met"), failures)
    rpc.supervise(Counter, (5,), on="w0", name="counter")
    could = [agent for agent in others if has_plan(agent)]
    assert could
    w0.close()
    with acting_as(could[0]):
        assert rpc.get_object("counter", follow=True).rpc_sync(retry=5).add() == 6


def test_supervise_waits_for_no_worker_that_can_not_take_over(pair: list[Agent]) -> None:
    fail_to_adopt(pair[1], LookupError("there is no such module"), 1)
    follower = rpc.supervise(Counter, (5,), on="w0", name="counter", follow=True)
    assert follower.rpc_sync().add() == 6
    assert not has_plan(pair[1])


def test_supervise_fails_if_no_other_worker_has_the_plan_in_time(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "AGAIN_SECONDS", 0.01)
    fail_to_adopt(pair[1], rpc.OwnerDied("w9", "it has not been met"), 1_000_000)
    with pytest.raises(rpc.RpcTimeout, match="known elsewhere"):
        rpc.supervise(Counter, on="w0", name="counter", timeout=0.3)
    wait_until(lambda: pair[0].names.find("counter") is None)


def test_supervise_goes_on_when_the_only_other_worker_is_gone(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    w0, w1 = pair
    asked = threading.Event()

    def adopt(*args: Any) -> Any:
        asked.set()
        raise rpc.OwnerDied("w9", "it has not been met")

    monkeypatch.setattr(supervisors_of(w1), "adopt", adopt)
    closer = threading.Thread(target=lambda: asked.wait(PATIENCE) and w1.close())
    closer.start()
    try:
        follower = rpc.supervise(Counter, (5,), on="w0", name="counter", follow=True)
    finally:
        asked.set()
        closer.join()
    assert follower.rpc_sync().add() == 6
    with acting_as(w0):
        assert rpc.get_object("counter", follow=True).rpc_sync().add() == 7


def test_supervisor_and_owner_may_be_one_worker(trio: list[Agent]) -> None:
    rpc.supervise(Counter, (5,), on="w0", name="counter", snapshot=SOON)
    with acting_as(trio[1]):
        follower = rpc.get_object("counter", follow=True)
        follower.rpc_sync().add(2)
        wait_until(lambda: getattr(snapshots_of(trio[1], "counter"), "count", 0) == 7)
        trio[0].close()
        assert follower.rpc_sync(retry=5).add() == 8
        assert follower.owner_name() == "w2"  # not the supervisor, as long as there is another


def test_too_many_restarts_are_given_up_and_users_are_told(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    agents = start(4)
    follower = rpc.supervise(Counter, on="w1", name="counter", restarts=1, follow=True)
    agents[1].close()
    assert owner_after_restart(follower) == "w2"
    agents[2].close()
    with pytest.raises(
        rpc.OwnerDied, match=r"'counter' was given up: more than 1 restarts within"
    ) as caught:
        follower.rpc_sync(retry=5).add()
    assert caught.value.given_up
    with pytest.raises(rpc.OwnerDied, match="given up"):
        follower.rpc_async(retry=5).add().wait()
    assert not [text for text in caplog.messages if re.search("calls .* again .*given up", text)]
    wait_until(lambda: any(one.levelno == logging.ERROR for one in caplog.records))


def test_object_that_can_not_be_made_again_uses_up_the_restarts(trio: list[Agent]) -> None:
    follower = rpc.supervise(make_unless, ("it",), on="w1", name="it", restarts=2, follow=True)
    _failures.append("it")
    try:
        trio[1].close()
        with pytest.raises(rpc.OwnerDied, match=r"given up: .*LookupError: it can't be made"):
            follower.rpc_sync(retry=5).add()
    finally:
        _failures.remove("it")


def test_no_worker_left_gives_up_in_a_fixed_group(pair: list[Agent]) -> None:
    children = [rpc.Child(Counter, on="w1", name="other"), rpc.Child(Counter, on="w1", name="one")]
    others, _ = rpc.supervise(children, follow=True)
    pair[1].close()
    assert others.rpc_sync(retry=5).add() == 1
    assert others.owner_name() == "w0"  # itself, rather than no worker


STRATEGIES = {"one_for_one": [11, 1, 11], "rest": [11, 1, 1], "all": [1, 1, 1]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_says_which_children_are_made_again(start: Any, strategy: str) -> None:
    agents = start(5)
    children = [rpc.Child(Counter, on=f"w{n}", name=f"c{n}") for n in (1, 2, 3)]
    followers = rpc.supervise(children, strategy=strategy, follow=True)
    assert [one.rpc_sync().add(10) for one in followers] == [10, 10, 10]
    agents[2].close()
    assert followers[1].rpc_sync(retry=5).add() == 1
    wait_until(lambda: _all_run(agents[0], "c1"))

    def counts() -> list[int]:
        return [one.to_here().count + (n != 1) for n, one in enumerate(followers)]

    wait_until(lambda: counts() == STRATEGIES[strategy])


def _all_run(agent: Agent, name: str) -> bool:
    state = supervisors_of(agent).state_of(name)
    return state is not None and all(child.is_running for child in state.children)


def test_killed_object_is_not_made_again(trio: list[Agent]) -> None:
    follower = rpc.supervise(Counter, on="w1", name="counter", follow=True)
    with acting_as(trio[2]):
        rpc.kill(rpc.get_object("counter"))

    def is_ended() -> bool:
        state = supervisors_of(trio[0]).state_of("counter")
        return state is not None and state.is_over

    wait_until(is_ended)
    with pytest.raises(rpc.Cancelled, match="was killed"):
        follower.rpc_sync().add()
    again = rpc.supervise(Counter, (3,), on="w2", name="counter", follow=True)
    assert again.rpc_sync().add() == 4


def test_the_error_of_the_first_construction_is_raised(trio: list[Agent]) -> None:
    _failures.append("it")
    try:
        children = [
            rpc.Child(Counter, on="w2", name="first"),
            rpc.Child(make_unless, ("it",), on="w1", name="it"),
        ]
        with pytest.raises(LookupError, match="it can't be made"):
            rpc.supervise(children, strategy="all")
    finally:
        _failures.remove("it")

    def is_gone() -> bool:
        try:
            rpc.get_object("first")
        except UnknownObject:
            return True
        return False

    wait_until(is_gone)


def test_name_in_use_is_refused(trio: list[Agent]) -> None:
    made = rpc.remote("w2", Counter, name="counter")
    made.rpc_sync().add()
    with pytest.raises(DuplicateName, match="'counter'"):
        rpc.supervise(Counter, on="w1", name="counter")


def test_following_reference_travels_and_keeps_no_object(trio: list[Agent]) -> None:
    follower = rpc.supervise(Counter, on="w1", name="counter", follow=True)
    assert rpc.rpc_sync("w2", add_by, args=(follower, 3)) == 3
    assert rpc.rpc_sync("w1", add_by, args=(follower, 3)) == 6
    assert follower.to_here().count == 6
    assert rpc.rpc_sync("w2", lambda: rpc.get_object("counter", follow=True)) is not None


def add_by(follower: Any, by: int) -> int:
    return follower.rpc_sync().add(by)  # type: ignore[no-any-return]


def test_asynchronous_calls_wait_for_the_new_object(trio: list[Agent]) -> None:
    follower = rpc.supervise(Counter, on="w1", name="counter", follow=True)
    trio[1].close()
    futures = [follower.rpc_async(retry=5).add() for _ in range(5)]
    assert sorted(future.wait() for future in futures) == [1, 2, 3, 4, 5]


def test_newcomers_and_strangers_are_told_of(trio: list[Agent]) -> None:
    with pytest.raises(UnknownObject, match="'nothing'"):
        rpc.get_object("nothing", follow=True)
    plain = rpc.remote("w1", Counter, name="plain")
    assert plain.rpc_sync().add() == 1
    with pytest.raises(UnknownObject, match="'plain'"):
        rpc.get_object("plain", follow=True)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"on": "w9"}, UnknownWorker),
        ({"on": ""}, TypeError),
        ({"on": 5}, TypeError),
        ({"restarts": -1}, ValueError),
        ({"per": 0}, ValueError),
        ({"strategy": "some"}, ValueError),
        ({"snapshot": 0}, ValueError),
        ({"snapshot": "x"}, TypeError),
        ({"concurrency": 0}, ValueError),
        ({"name": ""}, ValueError),
        ({"factory": 5}, TypeError),
        ({"factory": []}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(
    pair: list[Agent], wrong: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        rpc.supervise(**{"factory": Counter, "on": "w1", **wrong})
    with pytest.raises(ValueError, match="both"):
        rpc.Snapshot(1, save="dump")


@pytest.mark.parametrize("transport", ["inproc"])
def test_workers_with_a_policy_list_it(start: Any) -> None:
    methods = [Counter, Counter.add]
    listed = rpc.Only(functions=[*methods, rpc.supervise, rpc.get_object])
    start(3, policies={"w1": rpc.Only(functions=methods), "w2": listed})
    with pytest.raises(Refused, match="supervise"):
        rpc.supervise(Counter, on="w1", name="one")
    follower = rpc.supervise(Counter, (1,), on="w2", name="two", follow=True)
    assert follower.rpc_sync().add() == 2
