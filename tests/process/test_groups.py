"""`farcall.local`: groups that a program starts itself, as processes and as threads."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from patience import PATIENCE

import farcall
from farcall import autograd, errors, rpc
from farcall.groups import Group

KINDS = {"processes": True, "threads": False}


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


class Gate:
    """Events in the driver, for functions on workers to set and to wait for."""

    opened = threading.Event()


def open_gate() -> None:
    Gate.opened.set()


def pass_gate() -> bool:
    return Gate.opened.wait(PATIENCE)


def fail_at_two(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def first_waits_for_last(number: int) -> int:
    """Wait, as the first item, until another worker has taken all other items."""
    if number == 0:
        rpc.rpc_sync("main", pass_gate)
    if number == 9:
        rpc.rpc_sync("main", open_gate)
    return number


class Waiter(torch.nn.Module):
    """Waits on a worker until its call is cancelled."""

    was_cancelled = threading.Event()

    def wait(self) -> None:
        rpc.rpc_sync("main", open_gate)  # which ends as usual, cancelled or not
        while not rpc.cancelled():
            threading.Event().wait(0.001)
        self.was_cancelled.set()

    def forward(self) -> None:
        self.wait()


def wait_until_cancelled() -> None:
    Waiter().wait()


def item_waits_until_cancelled(item: int) -> None:
    wait_until_cancelled()


def first_waits_until_cancelled() -> None:
    if my_name() == "worker0":
        wait_until_cancelled()


def was_cancelled() -> bool:
    try:
        return Waiter.was_cancelled.wait(PATIENCE)
    finally:
        Waiter.was_cancelled.clear()


# All that give the future of a call at the first worker.
WAYS: dict[str, Callable[[Group], rpc.Future[None]]] = {
    "call_async": lambda group: group[0].call_async(wait_until_cancelled),
    "with_timeout": lambda group: group[0].with_timeout(PATIENCE).call_async(wait_until_cancelled),
    "all": lambda group: group.all.call_async(first_waits_until_cancelled)[0],
    "rpc_async": lambda group: rpc.rpc_async(group[0], wait_until_cancelled),
    "retry": lambda group: rpc.rpc_async(group[0], wait_until_cancelled, retry=1),
    "rref": lambda group: group[0].remote(Waiter).rpc_async().wait(),
    "handle": lambda group: farcall.spawn(group[0], Waiter).wait(),
    "module": lambda group: farcall.nn.RemoteModule(group[0].name, Waiter).forward_async(),
}


def my_name() -> str:
    return rpc.get_worker_info().name


def start_another() -> None:
    farcall.local(1)


@pytest.fixture(scope="module", params=KINDS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with farcall.local(2, processes=KINDS[request.param]) as made:
        yield made


def test_a_worker_is_called_with_arguments_as_they_are(group: Group) -> None:
    assert group[0].call(max, 1, 2) == 2
    assert group[1].call(sorted, [1, 2], reverse=True) == [2, 1]
    assert group[0].call_async(max, 3, 4).wait() == 4


def test_an_object_lives_on_a_worker(group: Group) -> None:
    counter = group[1].remote(Counter, 5)
    assert counter.owner_name() == "worker1"
    assert [counter.rpc_sync().add(1), counter.rpc_sync().add(2)] == [6, 8]


def test_a_worker_of_a_group_is_accepted_wherever_a_worker_is_named(group: Group) -> None:
    worker = group[1].with_timeout(0)
    assert worker == rpc.get_worker_info("worker1")
    assert rpc.get_worker_info(worker).id == 1
    assert rpc.rpc_sync(worker, my_name) == "worker1"
    assert rpc.rpc_async(worker, my_name).wait() == "worker1"
    assert rpc.remote(worker, my_name).to_here() == "worker1"
    counter = farcall.spawn(group[0], Counter, 5, name="by a worker of the group")
    assert counter.add.sync(1) == 6
    assert counter.owner() == group[0]


def test_all_workers_answer_in_their_order(group: Group) -> None:
    assert group.all.call(my_name) == ["worker0", "worker1"]
    assert [one.wait() for one in group.all.call_async(my_name)] == ["worker0", "worker1"]
    assert [one.owner_name() for one in group.all.remote(Counter, 0)] == ["worker0", "worker1"]


def test_a_group_is_a_sequence_of_workers(group: Group) -> None:
    assert len(group) == 2
    assert [worker.name for worker in group] == ["worker0", "worker1"]
    assert group[-1] is group["worker1"]
    with pytest.raises(IndexError, match="there is no worker 2: the group has 2"):
        group[2]
    with pytest.raises(KeyError, match="no worker is called 'w'"):
        group["w"]


def test_map_keeps_the_order(group: Group) -> None:
    assert group.map(abs, range(0, -20, -1)) == list(range(20))
    assert group.map(abs, iter(())) == []


def test_map_gives_work_to_the_worker_that_is_free(group: Group) -> None:
    Gate.opened.clear()
    assert group.map(first_waits_for_last, range(10)) == list(range(10))


def test_map_raises_the_error_of_the_first_item_that_failed(group: Group) -> None:
    """Hand out items without end: `map` returns only if it stops at the failure."""
    with pytest.raises(ValueError, match="two") as caught:
        group.map(fail_at_two, itertools.count())
    assert any("item 2 of map, on 'worker" in note for note in caught.value.__notes__)


def test_all_raise_the_error_of_the_first_worker_that_failed(group: Group) -> None:
    with pytest.raises(ValueError, match="two") as caught:
        group.all.call(fail_at_two, 2)
    assert any("on 'worker0'" in note for note in caught.value.__notes__)


def test_a_call_may_be_given_a_limit(group: Group) -> None:
    Gate.opened.clear()
    for call in (group[0].with_timeout(0.1).call, group.all.with_timeout(0.1).call):
        with pytest.raises(errors.RpcTimeout):
            call(rpc.rpc_sync, "main", pass_gate)
    Gate.opened.set()


def test_a_map_that_is_interrupted_cancels_the_calls_that_run(group: Group) -> None:
    Gate.opened.clear()

    def items() -> Iterator[int]:
        yield 0
        assert pass_gate()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.map(item_waits_until_cancelled, items())
    assert group[0].call(was_cancelled)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_asyncio", [False, True])
def test_the_holder_of_a_calls_future_can_cancel_the_call(
    group: Group, way: str, by_asyncio: bool
) -> None:
    Gate.opened.clear()
    future = WAYS[way](group)
    assert pass_gate()
    if by_asyncio:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(future, 0.01))
    else:
        assert future.cancel()
    with pytest.raises(rpc.Cancelled, match="cancelled"):
        future.wait()
    assert group[0].call(was_cancelled)


def test_the_functions_of_rpc_work_inside(group: Group) -> None:
    assert rpc.get_worker_info().name == "main"
    assert rpc.rpc_sync("worker1", my_name) == "worker1"
    assert rpc.rpc_sync(0, my_name) == "worker0"
    assert group[0].call(rpc.rpc_sync, "worker1", my_name) == "worker1"
    assert group[0].call(rpc.rpc_sync, "main", my_name) == "main"


def test_gradients_flow_through_workers(group: Group) -> None:
    with autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context, [group[1].call(torch.mul, x, 4).sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 4.0))


def test_a_group_in_a_group_is_refused(group: Group) -> None:
    with pytest.raises(RuntimeError, match=r"has a group already.*group\.close"):
        farcall.local(1)
    with pytest.raises(RuntimeError, match="this process is the worker 'worker0'"):
        group[0].call(start_another)


def test_a_worker_of_a_group_can_not_be_sent(group: Group) -> None:
    with pytest.raises(TypeError, match="in its driver only"):
        group[0].call(str, group[1])


def test_reprs_say_what_it_is(group: Group) -> None:
    assert repr(group) == "<farcall group, 2 workers>"
    assert repr(group[0]) == "<worker 'worker0' of <farcall group, 2 workers>>"
