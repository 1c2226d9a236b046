"""Details in which a distributed pass must be like a local one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from behaviour.autograd_helpers import (
    DistributedRun,
    Run,
    add_weight,
    check_same,
    compare,
    doubles,
    times,
    weights,
)
from behaviour.helpers import Gate, by_sync, in_threads, wait_at
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

# Memory of gradients.


def test_gradients_share_no_memory(pair: list[Agent]) -> None:
    """Users clip them in place, and optimizers change them."""
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", y="w0")
        h = run.call("w1", torch.add, run["x"], run["y"])
        run.backward((h + run["x"] + run["y"]).sum())
        run.gradient("x").mul_(0)
        check_same(run.gradient("y"), torch.full_like(run["y"], 2.0), "gradient of y")
        run.gradient("y")[0] = 5  # it is no expanded number
        check_same(run.gradient("y")[1:], torch.full_like(run["y"][1:], 2.0), "gradient of y")


def test_gradients_are_not_the_memory_of_the_user(pair: list[Agent]) -> None:
    constant = doubles(4)
    seen: list[torch.Tensor] = []
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", y="w0")
        run["y"].register_hook(seen.append)
        h = run.call("w1", times, run, "x", run["y"])
        run.backward((Constant.apply(run["x"], constant) + h * 0).sum())
        for name in ("x", "y"):
            run.gradient(name).add_(100)
    check_same(constant, doubles(4), "a tensor that a backward function gave")
    check_same(seen[0], torch.zeros_like(seen[0]), "a gradient that a hook kept")


class Constant(torch.autograd.Function):
    """Its gradient is a tensor that other code has, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        ctx.constant = constant
        return x * constant

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.constant, None


@pytest.mark.parametrize("size", [4, 4000])
def test_gradients_that_arrived_may_be_changed_in_place(pair: list[Agent], size: int) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        run.leaf("w0", "x", doubles(size))
        run.backward(run.call("w1", torch.sin, run["x"]).sum())
        run.gradient("x").mul_(2)
        check_same(run.gradient("x"), 2 * run["x"].detach().cos(), "gradient")


# Calls inside of a backward pass.


def call_in_hook(run: Run, x: torch.Tensor) -> torch.Tensor:
    h = x * run["w"]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = run.call("w0", torch.mul, gradient, 3.0)
        return run.call("w1", torch.add, plain, 1.0)

    return run.hook(h, "calling", hook)


def test_hook_that_makes_calls(pair: list[Agent]) -> None:
    """Call also the worker that waits for the pass."""

    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", call_in_hook, run, run["x"])
        return (run.call("w1", call_in_hook, run, h.tanh()) * h).sum()

    compare(pair, program)


def checkpointed_call(run: Run, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return run.call("w2", add_weight, run, "b", x.tanh()).sin()

    return checkpoint(part, x, use_reentrant=False) * run["a"]


def test_checkpoint_around_calls(trio: list[Agent]) -> None:
    """Make the calls again in the backward pass, and use nothing that they record then."""

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", checkpointed_call, run, run["x"])
        return checkpoint(
            lambda x: run.call("w1", checkpointed_call, run, x), h, use_reentrant=False
        ).sum()

    compare(trio, program, ways=[by_sync])


# Size.


def test_long_cycle(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w0", b="w1")
        h = run["x"]
        for _ in range(400):
            h = run.call("w1", add_weight, run, "b", h * 0.5) + h * 0.1
        return h.sum()

    compare(pair, program, ways=[by_sync])


def many(run: Run, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x * run["w"] for x in xs]


def test_many_tensors_in_a_message(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        results = run.call("w1", many, run, [run["x"] * n for n in range(1000)])
        return torch.stack(results[::3]).sum()

    compare(pair, program, ways=[by_sync])


def test_one_worker_thread_is_enough(start: Callable[..., list[Agent]]) -> None:
    """Run graphs of shared parts that go back and forth, and several at once."""
    agents = start(3, num_worker_threads=1)

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run["x"].tanh()
        for _ in range(4):
            h = h + run.call("w1", times, run, "a", h) * run.call("w2", times, run, "b", h)
        return h.sum()

    def train() -> None:
        with acting_as(agents[0]):
            compare(agents, program)

    with in_threads(*[train] * 4) as results:
        pass
    assert results == [None] * 4


# Features of torch.


@torch.jit.script
def scripted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * y


def test_torchscript_function(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0")
        return run.call("w1", scripted, run["x"], run["y"]).sum()

    compare(pair, program)


def in_saved_tensors_hooks(run: Run, x: torch.Tensor) -> torch.Tensor:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        run.count("pack")
        return tensor * 2

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        run.count("unpack")
        return tensor / 2

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return (x * run["w"]).sin()


def test_saved_tensors_hooks(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", v="w0", w="w1")
        h = run.call("w1", in_saved_tensors_hooks, run, run["x"])
        with torch.autograd.graph.save_on_cpu():
            return (run.call("w1", in_saved_tensors_hooks, run, h) * h * run["v"]).sum()

    compare(pair, program)


def with_multi_grad_hook(run: Run, x: torch.Tensor) -> torch.Tensor:
    a, b = run.arrived(x).sin(), run["w"].cos()
    torch.autograd.graph.register_multi_grad_hook((a, b), lambda gradients: run.count("multi"))
    return a * b


def test_multi_grad_hook(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", with_multi_grad_hook, run, run["x"]).sum()

    compare(pair, program)


@pytest.mark.filterwarnings("ignore:.*[Aa]nomaly")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_detection(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", times, run, "w", run["x"])
        return (run.call("w1", times, run, "w", h) * h).sum()

    with torch.autograd.detect_anomaly():
        compare(pair, program)
        run = DistributedRun()
        with dist_autograd.context() as run.context_id:
            run.leaf("w0", "x", torch.zeros(3))
            root = (run.call("w1", torch.sqrt, run["x"]) * 0).sum()
            with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
                run.backward(root)


def change_weight(run: Run) -> None:
    with torch.no_grad():
        run["w"].add_(1)


def test_weight_that_was_changed_before_backward(pair: list[Agent]) -> None:
    """torch's own check of versions works over there; the sent tensor is a copy."""
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        root = run.call("w1", times, run, "w", run["x"]).sum()
        with torch.no_grad():
            run["x"].add_(1)
        run.backward(root, retain_graph=True)
        run.call("w1", change_weight, run)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.backward(root)


# Calls under no_grad.


def given_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x * 2


def test_call_under_no_grad_keeps_the_link_of_tensors_that_it_hands_on(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0")
        with torch.no_grad():
            same_again, computed = rpc.rpc_sync("w1", given_back, args=(run["x"],))
        assert same_again.requires_grad
        assert not computed.requires_grad
        run.backward((same_again * computed).sum())
        check_same(run.gradient("x"), 2 * run["x"].detach(), "gradient of x")


@rpc.functions.async_execution
def doubled_in_a_callback(gate: Gate, attached: Gate, x: torch.Tensor, late: bool) -> Any:
    future = rpc.rpc_async("w0", wait_at, args=(gate,))
    if not late:
        future.wait()
    doubled = future.then(lambda _: x * 2)
    attached.open()
    return doubled


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_callback_runs_with_the_grad_mode_of_the_function_that_attached_it(
    pair: list[Agent], gate: Gate, quiet: bool, late: bool
) -> None:
    """Whichever thread runs it: at once the function's own, or later that of the reply."""
    x, attached = doubles(4).requires_grad_(), Gate()
    with dist_autograd.context():
        with torch.set_grad_enabled(not quiet):
            args = (gate, attached, x, late)
            answer = rpc.rpc_async("w1", doubled_in_a_callback, args=args)
        if late:
            attached.wait()
        gate.open()
        assert answer.wait().requires_grad is not quiet


# asyncio.


async def check_training(run: DistributedRun, name: str, started: asyncio.Barrier) -> None:
    with dist_autograd.context() as context_id:
        await started.wait()  # all are inside of their contexts
        h = await rpc.rpc_async("w1", times, args=(run, "w", run[name]))
        h, g = await asyncio.gather(
            rpc.rpc_async("w1", times, args=(run, "w", h)), rpc.rpc_async("w1", torch.sin, (h,))
        )
        await started.wait()
        dist_autograd.backward(context_id, [(h + 0 * g).sum()])
        found = dist_autograd.get_gradients(context_id)
        assert list(found) == [run[name]]
        check_same(found[run[name]], run["w"].detach() ** 2, name)


def test_contexts_of_several_asyncio_tasks(pair: list[Agent]) -> None:
    """Tie a context to its task, for as long as the thread runs that task."""
    run = DistributedRun()
    names = [f"x{number}" for number in range(5)]
    weights(run, w="w1", **dict.fromkeys(names, "w0"))

    async def main() -> None:
        started = asyncio.Barrier(len(names))
        await asyncio.gather(*[check_training(run, name, started) for name in names])

    asyncio.run(main())
    with dist_autograd.context():  # none is left in the thread
        pass


def test_executor_of_threads_in_a_context(pair: list[Agent]) -> None:
    """Threads that are started with a copy of the caller's context variables are in it, too."""
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        call = functools.partial(run.call, "w1", times, run, "w", run["x"])
        copied = contextvars.copy_context()
        with in_threads(functools.partial(copied.run, call)) as results:
            pass
        run.backward(results[0].sum())
        check_same(run.gradient("x"), run["w"].detach(), "gradient")
