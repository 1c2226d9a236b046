"""Compares the gradients of a distributed program with those of the same program run in one place.

A program is a function of a `Run`. It makes its leaves and its calls through it, and gives the
loss (or several roots), or runs backward itself and gives nothing:

    def program(run):
        x = run.leaf("w0", "x", torch.ones(3))
        run.leaf("w1", "w", torch.ones(3))
        return run.call("w1", multiply, run, x).sum()

    def multiply(run, x):
        return x * run["w"]

`compare(agents, program)` runs it with plain function calls and `Tensor.backward`, then over the
workers once for each way of calling, and compares values, gradients, and how often the nodes and
hooks ran that the program counts.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from behaviour.helpers import WAYS, Gate, Here, by_sync
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

Program = Callable[["Run"], Any]
Way = Callable[..., Any]


class Run(Here, ABC):
    """One run of a program. Arrives as itself, so handlers find leaves and counts in it."""

    context_id: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[str, torch.Tensor] = {}
        self.places: dict[str, str] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.counts: Counter[str] = Counter()
        self.noted: dict[str, Any] = {}
        self._lock = threading.Lock()

    # The parts of a program.

    def leaf(self, worker: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """Make a leaf that lives on `worker`."""
        leaf = value if value.requires_grad else value.requires_grad_()
        assert leaf.is_leaf
        with self._lock:
            self.leaves[name], self.places[name] = leaf, worker
        return leaf

    def module(self, worker: str, name: str, module: torch.nn.Module) -> torch.nn.Module:
        """Make a module whose parameters live on `worker`."""
        for parameter_name, parameter in module.named_parameters():
            self.leaf(worker, f"{name}.{parameter_name}", parameter)
        self.modules[name] = module
        return module

    def __getitem__(self, name: str) -> Any:
        return self.modules[name] if name in self.modules else self.leaves[name]

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def note(self, name: str, value: Any) -> None:
        """Keep a tensor (or anything else) that must be the same in both runs."""
        with self._lock:
            assert name not in self.noted, name
            self.noted[name] = value

    def node(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the same tensor behind a node that counts how often it runs backward."""
        counted: torch.Tensor = _Counted.apply(tensor, self, name)
        return counted

    def hook(
        self,
        tensor: torch.Tensor,
        name: str,
        change: Callable[[torch.Tensor], torch.Tensor | None] = lambda gradient: None,
    ) -> torch.Tensor:
        """Count how often a hook on this tensor is called; it may change the gradient."""

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            self.count(f"hook {name}")
            return change(gradient)

        tensor.register_hook(hook)
        return tensor

    # How a program calls, and what differs between the two.

    @abstractmethod
    def call(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def call_async(
        self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.futures.Future[Any]: ...

    @abstractmethod
    def remote(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def rref(self, value: Any) -> Any:
        """Return a reference of the acting worker to a value of its own."""

    @abstractmethod
    def arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor apart from the sender's, for handlers that change or hook it."""

    @abstractmethod
    def backward(self, roots: Any, **options: Any) -> None: ...

    @abstractmethod
    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient so far of a leaf of the acting worker."""


class LocalRun(Run):
    """Everything in the calling thread, with plain function calls."""

    def call(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Grad mode and autocast are a thread's own: a callee starts with the defaults.
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            result = function(*args, **kwargs)
            return result.wait() if isinstance(result, torch._C.Future) else result

    def call_async(
        self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.call(to, function, *args, **kwargs))
        return future

    def remote(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _LocalReference(self, to, self.call(to, function, *args, **kwargs))

    def rref(self, value: Any) -> Any:
        return _LocalReference(self, "", value)

    def arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def backward(self, roots: Any, **options: Any) -> None:
        torch.autograd.backward(_listed(roots), **options)

    def gradient(self, name: str) -> torch.Tensor:
        gradient = self.leaves[name].grad
        assert gradient is not None
        return gradient


class DistributedRun(Run):
    """With remote calls, inside the context `context_id`."""

    def __init__(self, way: Way = by_sync) -> None:
        super().__init__()
        self.way = way

    def call(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.way(to, function, args, kwargs=kwargs)

    def call_async(
        self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.futures.Future[Any]:
        return rpc.rpc_async(to, function, args=args, kwargs=kwargs)

    def remote(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return rpc.remote(to, function, args=args, kwargs=kwargs)

    def rref(self, value: Any) -> Any:
        return rpc.RRef(value)

    def arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def backward(self, roots: Any, **options: Any) -> None:
        dist_autograd.backward(self.context_id, _listed(roots), **options)

    def gradient(self, name: str) -> torch.Tensor:
        return dist_autograd.get_gradients(self.context_id)[self.leaves[name]]


class _LocalReference:
    """A stand-in for `RRef`, for a value in the same place."""

    def __init__(self, run: LocalRun, owner: str, value: Any) -> None:
        self._run, self._owner, self._value = run, owner, value

    def to_here(self) -> Any:
        return self._value

    local_value = to_here

    def owner(self) -> str:
        return self._owner

    def rpc_sync(self) -> Any:
        return _LocalMethods(self, self._run.call)

    def rpc_async(self) -> Any:
        return _LocalMethods(self, self._run.call_async)

    def remote(self) -> Any:
        return _LocalMethods(self, self._run.remote)


class _LocalMethods:
    def __init__(self, reference: _LocalReference, call: Callable[..., Any]) -> None:
        self._reference, self._call = reference, call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        reference = self._reference
        method = getattr(reference.to_here(), name)
        return lambda *args, **kwargs: self._call(reference.owner(), method, *args, **kwargs)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, run: Run, name: str) -> torch.Tensor:
        ctx.run, ctx.name = run, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.run.count(ctx.name)
        return gradient, None, None


# Comparing.


def compare(
    agents: Sequence[Agent],
    program: Program,
    *,
    ways: Sequence[Way] = WAYS,
    **options: Any,
) -> None:
    """Run the program in one place, then over the workers, and compare.

    Args:
        agents: the workers; the program runs on the first.
        program: see the module.
        ways: of calling (`behaviour.helpers.WAYS`), each of which gets a run.
        options: of `dist_autograd.backward`, if the program leaves that to this function.
    """
    local = LocalRun()
    roots = _forward(local, program)
    if roots:
        local.backward(roots)
    for way in ways:
        compare_with(local, agents, program, DistributedRun(way), roots, **options)


def compare_with(
    local: Run,
    agents: Sequence[Agent],
    program: Program,
    run: DistributedRun,
    expected_roots: Sequence[torch.Tensor],
    **options: Any,
) -> None:
    """Compare one distributed run with a local one."""
    with dist_autograd.context() as run.context_id:
        roots = _forward(run, program)
        if roots:
            run.backward(roots, **options)
        gradients = gradients_of(agents, run)
    check_same(roots, list(expected_roots), "roots")
    expected = {name: leaf.grad for name, leaf in local.leaves.items() if leaf.grad is not None}
    assert sorted(gradients) == sorted(expected), "other leaves have gradients than locally"
    for name, gradient in expected.items():
        check_same(gradients[name], gradient, f"gradient of {name!r}")
    assert run.counts == local.counts, "nodes or hooks ran another number of times than locally"
    assert sorted(run.noted) == sorted(local.noted)
    for name, value in local.noted.items():
        check_same(run.noted[name], value, name)
    for name, leaf in run.leaves.items():
        assert leaf.grad is None, f"distributed backward filled .grad of {name!r}"


def _forward(run: Run, program: Program) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(0)  # only it: a seed for GPUs takes 0.3 ms
    return _listed(program(run))


def _listed(roots: Any) -> list[torch.Tensor]:
    if roots is None:
        return []
    return [roots] if isinstance(roots, torch.Tensor) else list(roots)


def gradients_of(agents: Sequence[Agent], run: DistributedRun) -> dict[str, torch.Tensor]:
    """Return the context's gradients on all workers, by the names of the leaves."""
    found: dict[str, torch.Tensor] = {}
    for agent in agents:
        here: dict[torch.Tensor, torch.Tensor] = {}
        # A worker that took no part does not know the context.
        with acting_as(agent), contextlib.suppress(RuntimeError):
            here = dist_autograd.get_gradients(run.context_id)
        for leaf, gradient in here.items():
            names = [name for name, known in run.leaves.items() if known is leaf]
            assert names, f"{agent.me.name} has a gradient of {leaf}, no leaf of the program"
            assert run.places[names[0]] == agent.me.name, f"{names[0]!r} is not {agent.me.name}'s"
            found[names[0]] = gradient
    return found


def check_same(actual: Any, expected: Any, what: str) -> None:
    """Equal within float tolerance, with dtype and layout."""
    if isinstance(expected, torch.Tensor) and expected.layout is torch.sparse_coo:
        assert actual.layout is torch.sparse_coo, f"{what} is not sparse"
        actual, expected = actual.to_dense(), expected.to_dense()
    torch.testing.assert_close(
        actual, expected, check_stride=False, msg=lambda message: f"{what}: {message}"
    )


def doubles(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random numbers, the same in every run, exact enough to compare sums of another order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# Leaves, handlers and hooks that many programs use.


def times(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by a leaf of the worker that runs this."""
    return run.node(x * run[name], f"times {name}")


def add_weight(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    return x + run[name].sin()


def weights(run: Run, **places: str) -> None:
    """Leaves of shape [4], by name and worker."""
    for seed, (name, worker) in enumerate(places.items(), 10):
        run.leaf(worker, name, doubles(4, seed=seed))


def hold_up(gate: Gate, tensor: torch.Tensor) -> torch.Tensor:
    """Backward waits at the gate when it comes to this tensor."""

    def wait(gradient: torch.Tensor) -> None:
        gate.wait()

    tensor.register_hook(wait)
    return tensor
