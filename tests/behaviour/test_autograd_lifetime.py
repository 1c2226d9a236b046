"""After a context has ended, no worker keeps a tensor of it (BWD-4).

A `Watch` sees the end of memory and of nodes, not just of Python objects: what torch keeps inside
of its graphs counts.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import DistributedRun, Run, hold_up, weights
from behaviour.helpers import (
    PATIENCE,
    WAYS,
    Gate,
    Here,
    Precious,
    by_sync,
    echo,
    in_threads,
    wait_until,
)
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

each_way = pytest.mark.parametrize("way", WAYS)


class Watch(Here):
    """Knows which of the things that were made under its eyes are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition(threading.RLock())
        self._alive: Counter[str] = Counter()
        self.error: BaseException | None = None

    def over(self, thing: Any, name: str) -> None:
        with self._changed:
            self._alive[name] += 1
        weakref.finalize(thing, self._died, name)

    def _died(self, name: str) -> None:
        with self._changed:
            self._alive[name] -= 1
            self._changed.notify_all()

    def memory(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the same numbers in memory that is watched."""
        array = tensor.detach().numpy().copy()
        self.over(array, name)
        return torch.from_numpy(array)

    def tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the same tensor from a watched node, with its result and its gradient watched."""
        watched: torch.Tensor = _Watched.apply(tensor, self, name)
        return watched

    @property
    def alive(self) -> dict[str, int]:
        with self._changed:
            return dict(+self._alive)

    def wait_until_gone(self, *, collect: bool = False) -> None:
        """Wait until all is gone. `collect` lets garbage collection help: tracebacks hold much."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while self.alive:
                assert time.monotonic() < deadline, f"still there: {self.alive}"
                if collect:
                    gc.collect()
                self._changed.wait(0.1)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, watch: Watch, name: str) -> torch.Tensor:
        ctx.watch, ctx.name, ctx.precious = watch, name, Precious()
        watch.over(ctx.precious, f"node {name}")
        ctx.save_for_backward(watch.memory(tensor, f"saved by {name}"))
        return watch.memory(tensor, f"memory of {name}")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.name == "c" and ctx.watch.error is not None:
            raise ctx.watch.error
        (saved,) = ctx.saved_tensors
        return gradient + 0 * saved + 0 * ctx.watch.memory(gradient, "gradient"), None, None


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Watch without the garbage collector: memory must go when it is not needed, not later."""
    gc.collect()
    gc.disable()
    yield Watch()
    gc.enable()


def times(run: Run, watch: Watch, name: str, x: torch.Tensor) -> torch.Tensor:
    watch.over(x, f"argument of {name}")
    return watch.tensor(watch.tensor(x, f"before {name}") * run[name], name)


def forward_to(run: Run, watch: Watch, x: torch.Tensor) -> torch.Tensor:
    h = times(run, watch, "b", x)
    return watch.tensor(run.call("w2", times, run, watch, "c", h).sin(), "after c")


def loss_of(run: Run, watch: Watch) -> torch.Tensor:
    """Use a part on each worker, a cycle, and something that is not used."""
    h = watch.tensor(run["x"].tanh(), "sent")
    r = run.call("w1", forward_to, run, watch, h)
    watch.over(r, "result")
    run.call("w2", times, run, watch, "c", r)
    return (run.call("w1", times, run, watch, "b", r * h) * h).sum()


def start_run(way: Any = by_sync) -> DistributedRun:
    run = DistributedRun(way)
    weights(run, x="w0", b="w1", c="w2")
    return run


@each_way
def test_after_backward(trio: list[Agent], watch: Watch, way: Any) -> None:
    run = start_run(way)
    with dist_autograd.context() as run.context_id:
        run.backward(loss_of(run, watch))
        assert watch.alive
    watch.wait_until_gone()


@each_way
def test_without_backward(trio: list[Agent], watch: Watch, way: Any) -> None:
    run = start_run(way)
    with dist_autograd.context() as run.context_id:
        loss_of(run, watch)
        assert watch.alive
    watch.wait_until_gone()


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_after_backward_that_keeps_the_graph(
    trio: list[Agent], watch: Watch, options: dict[str, bool]
) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        loss = loss_of(run, watch)
        for _ in range(3):
            run.backward(loss, **options)
        del loss
        assert watch.alive
    watch.wait_until_gone()


def test_after_many_contexts(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    for _ in range(20):
        with dist_autograd.context() as run.context_id:
            run.backward(loss_of(run, watch))
    watch.wait_until_gone()


def test_context_that_an_error_ends(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    with contextlib.suppress(KeyError), dist_autograd.context() as run.context_id:
        loss_of(run, watch)
        raise KeyError("planted")
    watch.wait_until_gone(collect=True)


@each_way
def test_after_an_error_in_backward(trio: list[Agent], watch: Watch, way: Any) -> None:
    run = start_run(way)
    watch.error = ValueError("planted")
    with dist_autograd.context() as run.context_id, pytest.raises(ValueError, match="planted"):
        run.backward(loss_of(run, watch))
    watch.error = None  # it has a traceback
    watch.wait_until_gone(collect=True)


def test_after_an_error_and_a_try_that_works(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    watch.error = ValueError("planted")
    with dist_autograd.context() as run.context_id:
        loss = loss_of(run, watch)
        with pytest.raises(ValueError, match="planted"):
            run.backward(loss, retain_graph=True)
        watch.error = None
        run.backward(loss)
        del loss
    watch.wait_until_gone(collect=True)


def test_after_a_call_that_failed(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id, pytest.raises(ZeroDivisionError):
        run.call("w1", fail_after_use, run, watch, watch.tensor(run["x"], "sent"))
    watch.wait_until_gone(collect=True)


def fail_after_use(run: Run, watch: Watch, x: torch.Tensor) -> None:
    forward_to(run, watch, x)
    raise ZeroDivisionError


def test_after_fast_mode_complained(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id, pytest.raises(RuntimeError, match="smart"):
        run.backward(loss_of(run, watch), mode="fast")
    watch.wait_until_gone(collect=True)


# Calls that are late.


def late(run: Run, watch: Watch, gate: Gate, x: torch.Tensor) -> torch.Tensor:
    gate.wait()
    return forward_to(run, watch, x)


@each_way
def test_call_that_ends_after_its_context(
    trio: list[Agent], gate: Gate, watch: Watch, way: Any
) -> None:
    run = start_run()

    def call() -> None:
        with acting_as(trio[0]), dist_autograd.context() as run.context_id:
            futures.append(rpc.rpc_async("w1", late, args=(run, watch, gate, run["x"])))
            futures.append(rpc.remote("w1", late, args=(run, watch, gate, run["x"])))

    futures: list[Any] = []
    with in_threads(call):
        gate.wait_for_arrivals(2)
    gate.open()
    futures[0].wait()
    futures[1].to_here()
    futures.clear()
    watch.wait_until_gone()


def test_backward_part_that_ends_after_its_context(
    trio: list[Agent], gate: Gate, watch: Watch
) -> None:
    """Let the root give up, because of an error elsewhere."""
    run = start_run()
    watch.error = ValueError("planted")
    with dist_autograd.context() as run.context_id, pytest.raises(ValueError, match="planted"):
        run.backward(loss_with_slow_part(run, watch, gate))
    assert not gate.is_open
    gate.open()
    gate.wait_for_passed()
    watch.error = None
    watch.wait_until_gone(collect=True)


def slow(run: Run, watch: Watch, gate: Gate, x: torch.Tensor) -> torch.Tensor:
    return watch.tensor(hold_up(gate, times(run, watch, "b", x)), "slow")


def blow_after_arrival(run: Run, watch: Watch, gate: Gate, x: torch.Tensor) -> torch.Tensor:
    h = times(run, watch, "c", x)
    h.register_hook(lambda gradient: gate.wait_for_arrivals())  # it returns None
    return h


def loss_with_slow_part(run: Run, watch: Watch, gate: Gate) -> torch.Tensor:
    x = watch.tensor(run["x"], "sent")
    one = run.call("w1", slow, run, watch, gate, x)
    two = run.call("w2", blow_after_arrival, run, watch, gate, x)
    return (one * two).sum()


# Workers that are lost.


def test_creator_that_is_lost(trio: list[Agent], watch: Watch) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        loss = loss_of(run, watch)
        trio[0].close()
        del loss
        watch.wait_until_gone(collect=True)


def test_worker_in_the_middle_that_is_lost(trio: list[Agent], watch: Watch) -> None:
    """Lose the only worker from which the last one knows the context."""
    run = start_run()
    with dist_autograd.context() as run.context_id:
        loss = run.call("w1", forward_to, run, watch, run["x"]).sum()
        trio[1].close()
        with pytest.raises(rpc.PeerLost):
            run.backward(loss)
        del loss
    watch.wait_until_gone(collect=True)


@pytest.mark.parametrize("victim", [1, 2])
def test_worker_that_is_lost_during_backward(
    trio: list[Agent], gate: Gate, watch: Watch, victim: int
) -> None:
    run = start_run()

    def train() -> None:
        with acting_as(trio[0]), dist_autograd.context() as run.context_id:
            x = watch.tensor(run["x"], "sent")
            h = run.call("w2", echo, run.call("w1", slow, run, watch, gate, x))
            run.backward(run.call("w2", times, run, watch, "c", h).sum())

    with in_threads(train) as results:
        gate.wait_for_arrivals()
        closing = threading.Thread(target=trio[victim].close, daemon=True)
        closing.start()
    assert type(results[0]) is rpc.PeerLost
    results.clear()
    gate.open()
    closing.join(PATIENCE)
    watch.wait_until_gone(collect=True)


# Memory of large messages.


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def test_large_messages(pair: list[Agent]) -> None:
    """Memory that arrives belongs to no tensor that a Watch could see."""
    size = 8 << 20
    x = torch.zeros(size // 8, dtype=torch.float64, requires_grad=True)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            with dist_autograd.context() as context_id:
                for _ in range(3):
                    h = rpc.rpc_sync("w1", torch.sin, args=(x,))
                    dist_autograd.backward(context_id, [rpc.rpc_sync("w1", total, args=(h,))])
                del h

        def is_gone() -> bool:  # w1 hears of the end a little later
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before < size

        wait_until(is_gone)
    finally:
        tracemalloc.stop()
