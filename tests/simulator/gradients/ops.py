"""The steps of a program: their work, and their counts.

Operations keep elements between -1 and 1 if their inputs are. The same functions run in the local
and in the distributed run of a program, so a comparison shows how they are put together.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from simulator.gradients.program import SIDE, Leaf

Tensor = torch.Tensor
DTYPE = torch.float64


class Tally:
    """Counts what runs in backward, by name. Thread-safe.

    Attributes:
        runs: of each counting node with gradients that are not all zeros.
        zero_runs: of each counting node with zeros.
        hooks: calls of each hook with a gradient that is not all zeros.
        zero_hooks: calls of each hook with zeros.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.runs: Counter[str] = Counter()
        self.zero_runs: Counter[str] = Counter()
        self.hooks: Counter[str] = Counter()
        self.zero_hooks: Counter[str] = Counter()

    def ran(self, name: str, *gradients: Tensor) -> None:
        """Note that a counting node runs."""
        calls = self.runs if any(map(_has_values, gradients)) else self.zero_runs
        with self._lock:
            calls[name] += 1

    def hooked(self, name: str, gradient: Tensor) -> None:
        """Note that a hook is called."""
        calls = self.hooks if _has_values(gradient) else self.zero_hooks
        with self._lock:
            calls[name] += 1


class Site:
    """A program's things on one worker: parameters, stored values, counts.

    Args:
        index: of the worker.
        parameters: those of the worker, by index of the leaf; perhaps shared with other programs.
    """

    def __init__(self, index: int, parameters: dict[int, Tensor]) -> None:
        self.index = index
        self.parameters = parameters
        self.slots: dict[int, Tensor] = {}
        self.fresh: dict[str, Tensor] = {}
        self.retained: dict[str, Tensor] = {}
        self.tally = Tally()

    def leaves(self) -> dict[str, Tensor]:
        """Return all leaves of this worker, by name."""
        parameters = {f"p{index}": leaf for index, leaf in self.parameters.items()}
        return parameters | self.fresh

    def clear(self) -> None:
        """Break the cycles of `.grad` and, with create_graph, what it comes from."""
        for tensor in self.retained.values():
            tensor.grad = None


def make_parameters(
    leaves: Sequence[Leaf], worker: int, tally: Tally | None = None
) -> dict[int, Tensor]:
    """Return the parameters of one worker, by index of the leaf: equal arguments give equal values.

    Args:
        leaves: of the program.
        worker: whose.
        tally: counts the calls of their hooks.
    """
    parameters = {}
    for index, leaf in enumerate(leaves):
        if leaf.worker == worker:
            parameter = values(leaf.ndim, index + 1).requires_grad_()
            if leaf.hook:
                _add_hook(parameter, leaf.hook, f"p{index}", tally or Tally())
            parameters[index] = parameter
    return parameters


def values(ndim: int, number: int) -> Tensor:
    """Return a tensor of numbers between -1 and 1 that depend on `number` only."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand((SIDE,) * ndim, generator=generator, dtype=DTYPE) * 1.8 - 0.9


def _has_values(gradient: Tensor) -> bool:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return bool((dense != 0).any())


# Nodes that count.


class Counted(torch.autograd.Function):
    """sin(2 x); counts the runs of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tally: Tally, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tally, ctx.name = tally, name
        return torch.sin(2 * x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tally.ran(ctx.name, *gradients)
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * torch.cos(2 * x), None, None


class CountedPair(torch.autograd.Function):
    """(sin(x + y), x y); counts the runs of its backward, also with one output used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, tally: Tally, name: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.tally, ctx.name = tally, name
        return torch.sin(x + y), x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tally.ran(ctx.name, *gradients)
        x, y = ctx.saved_tensors
        outer, inner = gradients
        both = outer * torch.cos(x + y)
        return (
            (both + inner * y).sum_to_size(x.shape),
            (both + inner * x).sum_to_size(y.shape),
            None,
            None,
        )


class HalfBlind(torch.autograd.Function):
    """x cos(y), which says that it has no gradient for y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, tally: Tally, name: str) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.tally, ctx.name = tally, name
        return x * torch.cos(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tally.ran(ctx.name, *gradients)
        x, y = ctx.saved_tensors
        return (gradients[0] * torch.cos(y)).sum_to_size(x.shape), None, None, None


class Raises(torch.autograd.Function):
    """x; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("this backward function always raises")


# Hooks.

HOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "look": lambda gradient: None,
    "halve": lambda gradient: 0.5 * gradient,
    "squash": lambda gradient: torch.tanh(3 * gradient),
    "clamp": lambda gradient: gradient.clamp(-0.05, 0.08),
}


def _add_hook(tensor: Tensor, hook: str, name: str, tally: Tally) -> None:
    def call(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # torch says so for an output that was not used
            return None
        tally.hooked(name, gradient)
        if not gradient.is_sparse:
            return HOOKS[hook](gradient)
        # All hooks leave zeros as they are.
        gradient = gradient.coalesce()
        changed = HOOKS[hook](gradient.values())
        if changed is None:
            return None
        indices, shape = gradient.indices(), gradient.shape
        return torch.sparse_coo_tensor(indices, changed, shape, check_invariants=True)

    tensor.register_hook(call)  # type: ignore[no-untyped-call]


# Operations: the site, the inputs, the step's parameter and a name for what it counts; the outputs.

Operation = Callable[[Site, Sequence[Tensor], int, str], Sequence[Tensor]]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    """Enter a function into `OPERATIONS`, under its name without the "op_"."""
    OPERATIONS[function.__name__.removeprefix("op_")] = function
    return function


@operation
def op_parameter(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [site.parameters[number]]


@operation
def op_fresh_leaf(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    leaf = values(number % 3, number).requires_grad_()
    site.fresh[name] = leaf
    return [leaf]


@operation
def op_constant(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [values(number % 3, number)]


@operation
def op_add(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [(inputs[0] + inputs[1]) * 0.5]


@operation
def op_multiply(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0] * inputs[1]]


@operation
def op_matmul(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [(inputs[0] @ inputs[1]) * (1 / SIDE)]


@operation
def op_tanh(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [torch.tanh(2 * inputs[0])]


@operation
def op_mean(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].mean()]


@operation
def op_gather(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [torch.stack([tensor.mean() for tensor in inputs]).mean()]


@operation
def op_transpose(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].t()]


@operation
def op_row(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].select(0, number % SIDE)]


@operation
def op_column(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].select(-1, number % SIDE)]


@operation
def op_expand(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].expand(SIDE, SIDE)]


@operation
def op_shift(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    cut = 1 + number % (SIDE - 1)
    first, second = inputs[0].narrow(0, cut, SIDE - cut), inputs[1].narrow(0, 0, cut)
    return [torch.cat([first, second])]


@operation
def op_select(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].index_select(0, _indices(number))]


@operation
def op_embed(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [torch.nn.functional.embedding(_indices(number), inputs[0], sparse=True)]


def _indices(number: int) -> Tensor:
    """Return three rows, one of them twice."""
    first, second = number % SIDE, (number // SIDE) % SIDE
    return torch.tensor([first, second, first])


@operation
def op_detach(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [inputs[0].detach()]


@operation
def op_counted(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [_apply(Counted, inputs[0], site.tally, name)]


@operation
def op_counted_pair(
    site: Site, inputs: Sequence[Tensor], number: int, name: str
) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = _apply(CountedPair, *inputs, site.tally, name)
    return outputs


@operation
def op_half_blind(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [_apply(HalfBlind, *inputs, site.tally, name)]


@operation
def op_raises(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [_apply(Raises, inputs[0])]


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    # Not of a leaf, nor are leaves indexed here: other threads use them, too. Where one thread has
    # torch make the accumulator of a leaf and another one has the GIL, they wait for each other
    # forever (torch 2.13).
    free = [a.expand_as(a) if isinstance(a, Tensor) and a.is_leaf else a for a in args]
    return function.apply(*free)  # type: ignore[no-untyped-call]


@operation
def op_checkpoint(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    inside = partial(_checkpointed, tally=site.tally, name=name)
    return [checkpoint(inside, inputs[0], use_reentrant=False)]


def _checkpointed(x: Tensor, tally: Tally, name: str) -> Tensor:
    counted: Tensor = _apply(Counted, torch.tanh(x), tally, name)
    return counted * torch.cos(x)


# In place.


@operation
def op_scale_(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    inputs[0].mul_(-0.7)
    return []


@operation
def op_mix_(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    inputs[0].add_(inputs[1]).mul_(0.5)
    return []


@operation
def op_set_row_(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    inputs[0][number % SIDE] = inputs[1]
    return []


# On values, without a result.


@operation
def op_hook(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    if inputs[0].requires_grad:
        _add_hook(inputs[0], list(HOOKS)[number % len(HOOKS)], name, site.tally)
    return []


@operation
def op_retain(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    if inputs[0].requires_grad and not inputs[0].is_leaf:
        inputs[0].retain_grad()
        site.retained[name] = inputs[0]
    return []


@operation
def op_stash(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    site.slots[number] = inputs[0]
    return []


@operation
def op_stashed(site: Site, inputs: Sequence[Tensor], number: int, name: str) -> Sequence[Tensor]:
    return [site.slots[number]]
