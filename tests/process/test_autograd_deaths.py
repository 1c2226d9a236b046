"""Processes die during distributed backward passes: the root hears of it, no worker keeps anything.

A backward function of the victim waits forever when the victim is killed. No outcome depends on
how long anything takes; the seconds that are checked are far above the usual ones, which are
printed, and far below the timeout of calls.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, call, join, leave_all

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.current import default_agent

GENEROUS = PATIENCE / 2  # seconds; the timeout of calls is PATIENCE
BOUND = 2.0  # the promise, which is printed when it is not kept

_arrived = threading.Semaphore(0)
_never = threading.Event()
_alive: Counter[str] = Counter()
_changed = threading.Condition(threading.RLock())
_kept: dict[str, Any] = {}


# The parts of a graph in this process.


class Watched(torch.autograd.Function):
    """Sees the end of its node and of the memory that the node saved and made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(watched_copy(x, f"saved by {name}"))
        ctx.node = Anything()
        watch(ctx.node, f"node {name}")
        return watched_copy(x, f"result of {name}")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return watched_copy(gradient + 0 * saved, "gradient"), None


class Anything:
    pass


def watched_copy(x: torch.Tensor, name: str) -> torch.Tensor:
    array = x.detach().numpy().copy()
    watch(array, name)
    return torch.from_numpy(array)


def watch(thing: Any, name: str) -> None:
    with _changed:
        _alive[name] += 1
    weakref.finalize(thing, died, name)


def died(name: str) -> None:
    with _changed:
        _alive[name] -= 1
        _changed.notify_all()


def wait_until_all_is_gone() -> dict[str, int]:
    """Return the leftovers: none, unless that takes longer than a test has patience."""
    with _changed:
        deadline = time.monotonic() + PATIENCE / 2
        while +_alive and time.monotonic() < deadline:
            gc.collect()
            _changed.wait(0.1)
        return dict(+_alive)


def has_something() -> bool:
    return bool(+_alive)


# Programs.


def weight() -> torch.Tensor:
    """Return a leaf of the process."""
    return _kept.setdefault("weight", torch.full((4,), 2.0, requires_grad=True))


def pass_on(route: list[str], victim: str, x: torch.Tensor) -> torch.Tensor:
    """Pass on along the route; the backward function of the victim never ends."""
    h = Watched.apply(x * weight(), rpc.get_worker_info().name)
    if rpc.get_worker_info().name == victim:
        h.register_hook(wait_for_ever)
    return rpc.rpc_sync(route[0], pass_on, args=(route[1:], victim, h)) if route else h.sin()


def wait_for_ever(gradient: torch.Tensor) -> None:
    _arrived.release()
    _never.wait()


def wait_until_reached() -> None:
    assert _arrived.acquire(timeout=PATIENCE)


def train(routes: list[list[str]], victim: str = "", mode: str = "smart") -> list[float]:
    """Make a pass through all routes; return the gradient of this process's leaf."""
    with dist_autograd.context() as context_id:
        h = Watched.apply(weight().tanh(), "root")
        parts = [rpc.rpc_sync(to, pass_on, args=(rest, victim, h)) for to, *rest in routes]
        _kept["forward is done"] = True
        _kept["go on"].wait(PATIENCE) if "go on" in _kept else None
        dist_autograd.backward(context_id, [torch.stack(parts).prod(0).sum()], mode=mode)
        return dist_autograd.get_gradients(context_id)[weight()].tolist()


def train_in_vain(*args: Any) -> tuple[str, str]:
    """Return the error's type and worker. The error stays here: its traceback holds the pass."""
    try:
        train(*args)
    except (rpc.PeerLost, rpc.RpcTimeout) as error:
        return type(error).__name__, getattr(error, "worker", "")
    raise AssertionError("it did not fail")


def check_death(victim: Member, root: Member) -> None:
    """Kill the victim in its backward function, and see how the root ends."""
    victim.run(wait_until_reached)
    start = time.monotonic()
    victim.kill()
    assert root.result() == ("PeerLost", victim.name)
    seconds = time.monotonic() - start
    late = " LATE" if seconds > BOUND else ""
    print(f"\nbackward ended {seconds * 1000:.0f} ms after SIGKILL of {victim.name}{late}")
    assert seconds < GENEROUS


def check_nothing_is_left(*members: Member) -> None:
    for member in members:
        assert member.run(wait_until_all_is_gone) == {}, member.name


# Deaths during a pass.


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("victim", [1, 2])
def test_sigkill_of_a_worker_of_a_chain_during_its_backward(
    crew: Crew, victim: int, mode: str
) -> None:
    members = crew.group(3)
    members[0].start(train_in_vain, [["w1", "w2"]], f"w{victim}", mode)
    dead = members.pop(victim)
    check_death(dead, members[0])
    check_nothing_is_left(*members)
    assert members[0].run(train, [[members[1].name]]) == members[0].run(
        train, [[members[1].name]]
    )  # the others go on
    check_nothing_is_left(*members)
    leave_all(*members)


def test_sigkill_of_one_of_two_workers_during_its_backward(crew: Crew) -> None:
    root, other, victim = crew.group(3)
    root.start(train_in_vain, [["w1"], ["w2"]], "w2")
    check_death(victim, root)
    check_nothing_is_left(root, other)
    leave_all(root, other)


def test_sigkill_of_a_worker_that_the_pass_comes_back_to(crew: Crew) -> None:
    root, other, victim = crew.group(3)
    root.start(train_in_vain, [["w2", "w1", "w2", "w0", "w1"]], "w2")
    check_death(victim, root)
    check_nothing_is_left(root, other)
    leave_all(root, other)


def test_sigkill_of_a_worker_in_several_passes_at_once(crew: Crew) -> None:
    first, second, victim = crew.group(3)
    first.start(train_in_vain, [["w1", "w2"]], "w2")
    second.start(train_in_vain, [["w2"]], "w2")
    victim.run(wait_until_reached)
    check_death(victim, first)
    assert second.result() == ("PeerLost", "w2")
    check_nothing_is_left(first, second)
    leave_all(first, second)


def test_sigkill_between_forward_and_backward(crew: Crew) -> None:
    root, other, victim = crew.group(3)
    root.run(prepare_to_go_on)
    root.start(train_in_vain, [["w1", "w2"]])
    # The root is in a step, so another worker tells it to go on.
    other.run(wait_for_forward, "w0")
    victim.kill()
    start = time.monotonic()
    other.run(call, "w0", go_on)
    assert root.result() == ("PeerLost", "w2")
    print(f"\nbackward ended after {(time.monotonic() - start) * 1000:.0f} ms")
    check_nothing_is_left(root, other)
    leave_all(root, other)


def prepare_to_go_on() -> None:
    _kept["go on"] = threading.Event()


def go_on() -> None:
    _kept["go on"].set()


def is_forward_done() -> bool:
    return "forward is done" in _kept


def wait_for_forward(root: str) -> None:
    pause = threading.Event()
    while not rpc.rpc_sync(root, is_forward_done):
        pause.wait(0.01)


# Death of the worker whose context it is.


def test_sigkill_of_the_creator_during_its_pass(crew: Crew) -> None:
    """Drop the creator's context on the others, though a backward function of one still runs."""
    creator, middle, last = crew.group(3)
    creator.start(train, [["w1", "w2"]], "w2")
    last.run(wait_until_reached)
    assert middle.run(has_something)
    creator.kill()
    check_nothing_is_left(middle)
    last.run(let_go)
    check_nothing_is_left(last)
    leave_all(middle, last)


def let_go() -> None:
    _never.set()


def test_sigkill_of_the_creator_between_passes(crew: Crew) -> None:
    creator, middle, last = crew.group(3)
    creator.run(prepare_to_go_on)
    creator.start(train, [["w1", "w2"], ["w2"]])
    middle.run(wait_for_forward, "w0")
    assert middle.run(has_something)
    assert last.run(has_something)
    creator.kill()
    check_nothing_is_left(middle, last)
    leave_all(middle, last)


def test_sigkill_of_the_creator_in_a_loop_of_contexts(crew: Crew) -> None:
    creator, middle, last = crew.group(3)
    creator.start(train_for_ever, [["w1", "w2"], ["w2"]])
    middle.run(wait_for_steps, "w0", 20)
    creator.kill()
    check_nothing_is_left(middle, last)
    leave_all(middle, last)


def train_for_ever(routes: list[list[str]]) -> None:
    _kept["steps"] = 0
    while True:
        train(routes)
        _kept["steps"] += 1


def steps() -> int:
    return int(_kept.get("steps", 0))


def wait_for_steps(root: str, count: int) -> None:
    pause = threading.Event()
    while rpc.rpc_sync(root, steps) < count:
        pause.wait(0.01)


# A name that comes back.


def test_worker_that_comes_back_is_no_part_of_old_contexts(crew: Crew) -> None:
    """Let a successor join at will, which knows nothing of the lost one's graph."""
    root, lost, new = crew.members(3)
    for member in (root, lost):
        member.run(join, member.name, -1, None, crew.init_method)
    root.run(prepare_to_go_on)
    root.start(train_in_vain, [["w1"]])
    lost.run(wait_for_forward, "w0")
    lost.kill()
    new.run(join, "w1", -1, None, crew.init_method)
    new.run(call, "w0", go_on)
    assert root.result()[1] == "w1"
    check_nothing_is_left(root, new)
    root.run(train, [["w1"]])  # a new context works with the new one
    check_nothing_is_left(root, new)
    leave_all(root, new)


# A worker that stops for a while.


def set_timeout(seconds: float) -> None:
    """Set the timeout of all calls of this process from now on."""
    agent = default_agent()
    assert agent is not None
    agent.status.rpc_timeout = seconds


def go_on_with_timeout(seconds: float) -> None:
    set_timeout(seconds)
    go_on()


def test_stopped_worker_is_a_timeout(crew: Crew) -> None:
    root, middle, stopped = crew.group(3)
    root.run(prepare_to_go_on)
    root.start(train_in_vain, [["w1", "w2"]])
    middle.run(wait_for_forward, "w0")
    stopped.stop()
    middle.run(call, "w0", go_on_with_timeout, 1.0)
    assert root.result()[0] == "RpcTimeout"
    check_nothing_is_left(root, middle)
    stopped.signal(signal.SIGCONT)
    check_nothing_is_left(stopped)
    root.run(set_timeout, PATIENCE)
    root.run(train, [["w1", "w2"]])
    check_nothing_is_left(root, middle, stopped)
    leave_all(root, middle, stopped)
