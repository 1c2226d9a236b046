"""Many contexts at once: from the threads of one worker, and from several trainers."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import (
    DistributedRun,
    LocalRun,
    Run,
    check_same,
    compare_with,
    doubles,
    hold_up,
)
from behaviour.helpers import Gate, Here, in_threads
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

THREADS = 6
STEPS = 5


class Shared(Here):
    """Leaves that all contexts use; each of their gradients is known."""

    def __init__(self) -> None:
        super().__init__()
        self.b = doubles(4, seed=2).requires_grad_()
        self.c = doubles(4, seed=3).requires_grad_()


def inner(shared: Shared, x: torch.Tensor) -> torch.Tensor:
    return (x * shared.c).sin()


def outer(shared: Shared, x: torch.Tensor) -> torch.Tensor:
    h = x.tanh() * shared.b
    return rpc.rpc_sync("w2", inner, args=(shared, h)) * h


def expected(shared: Shared, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.detach().requires_grad_()
    h = x.tanh() * shared.b
    loss = (inner(shared, h) * h * x).sum()
    return torch.autograd.grad(loss, [x, shared.b, shared.c])


def gradient_of(context_id: int, shared: Shared, name: str) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[getattr(shared, name)]


def step(shared: Shared, seed: int, ps: str = "w1", **options: Any) -> None:
    x = doubles(4, seed=seed).requires_grad_()
    with dist_autograd.context() as context_id:
        r = rpc.rpc_sync(ps, outer, args=(shared, x))
        dist_autograd.backward(context_id, [(r * x).sum()], **options)
        found = (
            dist_autograd.get_gradients(context_id)[x],
            rpc.rpc_sync(ps, gradient_of, args=(context_id, shared, "b")),
            rpc.rpc_sync("w2", gradient_of, args=(context_id, shared, "c")),
        )
    for gradient, right in zip(found, expected(shared, x), strict=True):
        check_same(gradient, right, f"gradient of {seed}")


def check_none_failed(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_contexts_of_several_threads(trio: list[Agent], mode: str) -> None:
    shared = Shared()

    def train(thread: int) -> None:
        with acting_as(trio[0]):
            for number in range(STEPS):
                step(shared, 100 * thread + number, mode=mode)

    with in_threads(*[functools.partial(train, n) for n in range(THREADS)]) as results:
        pass
    check_none_failed(results)
    assert shared.b.grad is None
    assert shared.c.grad is None


def test_several_trainers_and_one_parameter_server(start: Callable[..., list[Agent]]) -> None:
    """Trainers w0, w3, w4, w5 use w1, which uses w2; w2 trains, too."""
    agents = start(6)
    shared = Shared()

    def train(agent: Agent) -> None:
        with acting_as(agent):
            for number in range(STEPS):
                step(shared, 100 * agent.me.id + number)

    trainers = [agent for agent in agents if agent.me.name != "w1"]
    with in_threads(*[functools.partial(train, agent) for agent in trainers]) as results:
        pass
    check_none_failed(results)


def test_every_worker_trains_with_every_other(trio: list[Agent]) -> None:
    shared = Shared()

    def train(agent: Agent, ps: str) -> None:
        with acting_as(agent):
            for number in range(STEPS):
                step(shared, 100 * agent.me.id + number, ps)

    pairs = [(agent, ps) for agent in trio for ps in ("w0", "w1", "w2")]
    with in_threads(*[functools.partial(train, *one) for one in pairs]) as results:
        pass
    check_none_failed(results)


def slow_times(gate: Gate, shared: Shared, x: torch.Tensor) -> torch.Tensor:
    return hold_up(gate, x * shared.b)


def test_backward_passes_that_overlap_for_sure(trio: list[Agent], gate: Gate) -> None:
    """Have every pass inside its callee's backward function when the first one may go on."""
    shared = Shared()

    def train(seed: int) -> None:
        with acting_as(trio[0]), dist_autograd.context() as context_id:
            x = doubles(4, seed=seed).requires_grad_()
            r = rpc.rpc_sync("w1", slow_times, args=(gate, shared, x))
            dist_autograd.backward(context_id, [(r * x).sum()])
            mine = dist_autograd.get_gradients(context_id)[x]
            theirs = rpc.rpc_sync("w1", gradient_of, args=(context_id, shared, "b"))
            check_same(mine, 2 * (x * shared.b).detach(), "gradient of x")
            check_same(theirs, (x * x).detach(), "gradient of b")

    with in_threads(*[functools.partial(train, n) for n in range(THREADS)]) as results:
        gate.wait_for_arrivals(THREADS)
        gate.open()
    check_none_failed(results)


def test_worker_threads_are_not_used_up_by_passes_that_wait(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    """Send more passes through w1 to w2, where they stay, than w1 has threads."""
    agents = start(3, num_worker_threads=2)
    shared = Shared()

    def train(seed: int) -> None:
        with acting_as(agents[0]), dist_autograd.context() as context_id:
            x = doubles(4, seed=seed).requires_grad_()
            r = rpc.rpc_sync("w1", pass_on, args=(shared, gate, x))
            dist_autograd.backward(context_id, [r.sum()])

    with in_threads(*[functools.partial(train, n) for n in range(THREADS)]) as results:
        gate.wait_for_arrivals(2)  # w2 runs two backward functions
        assert rpc.rpc_sync("w1", torch.add, args=(1, 2)) == 3
        gate.open()
    check_none_failed(results)


def pass_on(shared: Shared, gate: Gate, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w2", slow_times, args=(gate, shared, x * shared.c))


def test_backward_passes_of_one_context_at_once(trio: list[Agent]) -> None:
    """Threads that share a context's id: their gradients add up."""
    shared = Shared()
    x = doubles(4, seed=5).requires_grad_()
    with dist_autograd.context() as context_id:
        losses = [(rpc.rpc_sync("w1", outer, args=(shared, x)) * x).sum() for _ in range(THREADS)]

        def differentiate(loss: torch.Tensor) -> None:
            with acting_as(trio[0]):
                dist_autograd.backward(context_id, [loss])

        with in_threads(*[functools.partial(differentiate, loss) for loss in losses]) as results:
            pass
        check_none_failed(results)
        for name, right in zip(("x", "b", "c"), expected(shared, x), strict=True):
            if name == "x":
                found = dist_autograd.get_gradients(context_id)[x]
            else:
                to = "w1" if name == "b" else "w2"
                found = rpc.rpc_sync(to, gradient_of, args=(context_id, shared, name))
            check_same(found, THREADS * right, name)


def test_forward_and_backward_of_one_context_at_once(trio: list[Agent]) -> None:
    """Threads with copies of the context variables: one calls while another is in a pass."""
    shared = Shared()
    xs = [doubles(4, seed=seed).requires_grad_() for seed in range(THREADS)]
    with dist_autograd.context() as context_id:

        def train(x: torch.Tensor) -> None:
            for _ in range(STEPS):
                h = rpc.rpc_sync("w1", outer, args=(shared, x))
                rpc.rpc_sync("w2", inner, args=(shared, h))  # not used
                dist_autograd.backward(context_id, [(h * x).sum()])

        copies = [functools.partial(contextvars.copy_context().run, train, x) for x in xs]
        with in_threads(*copies) as results:
            pass
        check_none_failed(results)
        found = dist_autograd.get_gradients(context_id)
        right = [expected(shared, x) for x in xs]
        for x, (gradient, _, _) in zip(xs, right, strict=True):
            check_same(found[x], STEPS * gradient, "gradient of x")
        for to, name, index in (("w1", "b", 1), ("w2", "c", 2)):
            total = torch.stack([gradients[index] for gradients in right]).sum(0)
            there = rpc.rpc_sync(to, gradient_of, args=(context_id, shared, name))
            check_same(there, STEPS * total, f"gradient of {name}")


def test_passes_over_the_same_graph_at_once(trio: list[Agent]) -> None:
    shared = Shared()
    x = doubles(4, seed=5).requires_grad_()
    with dist_autograd.context() as context_id:
        loss = (rpc.rpc_sync("w1", outer, args=(shared, x)) * x).sum()

        def differentiate() -> None:
            with acting_as(trio[0]):
                dist_autograd.backward(context_id, [loss], retain_graph=True)

        with in_threads(*[differentiate] * THREADS) as results:
            pass
        check_none_failed(results)
        found = dist_autograd.get_gradients(context_id)[x]
        check_same(found, THREADS * expected(shared, x)[0], "gradient of x")


def test_calls_at_once_within_one_context(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(4))
        run.leaf("w1", "b", doubles(4, seed=2))
        run.leaf("w2", "c", doubles(4, seed=3))
        futures = [
            run.call_async(to, multiply, run, name, run["x"] * n)
            for n in range(1, 30)
            for to, name in (("w1", "b"), ("w2", "c"))
        ]
        return torch.stack([future.wait() for future in futures]).sum()

    local = LocalRun()
    roots = [program(local)]
    local.backward(roots)
    for _ in range(5):
        compare_with(local, trio, program, DistributedRun(), roots)


def multiply(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    return x * run[name]


def test_local_training_at_the_same_time(trio: list[Agent]) -> None:
    """`Tensor.backward` of other threads is not disturbed, and fills `.grad`."""
    shared = Shared()

    def train() -> None:
        with acting_as(trio[0]):
            for number in range(STEPS):
                step(shared, number)

    def train_locally() -> torch.Tensor:
        x = doubles(4).requires_grad_()
        for _ in range(200):
            (x * x).sum().backward()
        assert x.grad is not None
        return x.grad / (400 * x.detach())

    with in_threads(train, train_locally, train) as results:
        pass
    check_none_failed(results)
    torch.testing.assert_close(results[1], torch.ones_like(results[1]))
