"""Drawing operations: which fit the values of a block, and what they do to memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Protocol, TypeVar

from simulator.gradients.program import Leaf, Op
from simulator.gradients.scope import Group, Scope, Value

T = TypeVar("T")
Draw = Callable[["Drawer", Scope], bool]


class Drawer(Protocol):
    """The part of the generator that drawing needs."""

    random: Random
    leaves: tuple[Leaf, ...]
    operations: Sequence[Draw]

    def number(self) -> int:
        """Return a number for a new value."""

    def slot(self) -> int:
        """Return a slot for a new stored value."""

    def pick(self, options: Sequence[T]) -> T:
        """Return one of these; rather a late one."""


def draw(drawer: Drawer, scope: Scope) -> None:
    """Add one step to the block."""
    for _ in range(4):
        if drawer.random.choice(drawer.operations)(drawer, scope):
            return
    parameter(drawer, scope)


def parameter(drawer: Drawer, scope: Scope) -> bool:
    """Use a parameter of this worker; if there is none, make a leaf, or a constant."""
    here = [i for i, leaf in enumerate(drawer.leaves) if leaf.worker == scope.worker]
    if here:
        index = drawer.random.choice(here)
        _add(drawer, scope, "parameter", (), drawer.leaves[index].ndim, index, SHARED)
        scope.tensors[-1] = scope.tensors[-1]._replace(is_parameter=True, origin=-1 - index)
        return True
    return (fresh_leaf if drawer.random.random() < 0.5 else constant)(drawer, scope)


def fresh_leaf(drawer: Drawer, scope: Scope) -> bool:
    """Make a leaf on the way."""
    number = drawer.random.randrange(1000)
    _add(drawer, scope, "fresh_leaf", (), number % 3, number, SHARED)
    return True


def constant(drawer: Drawer, scope: Scope) -> bool:
    """Return a tensor that does not require grad."""
    number = drawer.random.randrange(1000)
    _add(drawer, scope, "constant", (), number % 3, number, Group())
    return True


SHARED = Group(changeable=False, shared=True)  # of what other blocks may see, too

# The effect of an operation on memory: its output is new, or a view of the input; or new, but the
# inputs, or the inputs and the output, are needed in the backward pass. Under no_grad there are no
# views: torch takes them for tensors that require grad, though they are no part of the graph.
NEW = "new"
VIEW = "view"
SAVES_INPUTS = "saves inputs"
SAVES_ALL = "saves all"


def _add(
    drawer: Drawer,
    scope: Scope,
    name: str,
    inputs: Sequence[Value],
    ndim: int,
    number: int,
    group: Group,
    differentiable: bool | None = None,
) -> Value:
    is_view = any(group is value.group for value in inputs)
    may_be_quiet = bool(inputs) and not is_view and name != "gather"
    quietly = may_be_quiet and drawer.random.random() < 0.04
    if differentiable is None:
        differentiable = any(value.differentiable for value in inputs) or name in (
            "parameter",
            "fresh_leaf",
        )
    group.aliased |= is_view
    differentiable = differentiable and not (quietly or (inputs and scope.quiet))
    depth = 1 + max((x.depth for x in inputs), default=0) if differentiable else 0
    dense = not is_view or all(x.dense for x in inputs)
    value = Value(drawer.number(), ndim, group, differentiable, dense, depth=depth)
    scope.tensors.append(value)
    numbers = tuple(value.number for value in inputs)
    scope.steps.append(Op(name, numbers, (value.number,), number, quietly))
    return value


def _one(name: str, memory: str, *ndims: int, result: int | None = None) -> Draw:
    """Return an operation of one tensor with one of these numbers of dimensions."""

    def draw_one(drawer: Drawer, scope: Scope) -> bool:
        options = scope.of_ndim(*ndims)
        if not options or (memory == VIEW and scope.quiet):
            return False
        x = drawer.pick(options)
        if memory.startswith("saves"):
            x.group.changeable = False
        group = x.group if memory == VIEW else Group(memory != SAVES_ALL)
        ndim = x.ndim if result is None else x.ndim + result if result < 0 else result
        number = drawer.random.randrange(9)
        _add(drawer, scope, name, [x], ndim, number, group)
        return True

    return draw_one


def _two(name: str, memory: str, fits: Callable[[int, int], int | None]) -> Draw:
    """Return an operation of two tensors; `fits` gives the result's dimensions, or None."""

    def draw_two(drawer: Drawer, scope: Scope) -> bool:
        if not scope.tensors:
            return False
        x, y = drawer.pick(scope.tensors), drawer.pick(scope.tensors)
        ndim = fits(x.ndim, y.ndim)
        if ndim is None:
            return False
        if memory == SAVES_INPUTS:
            x.group.changeable = y.group.changeable = False
        _add(drawer, scope, name, [x, y], ndim, drawer.random.randrange(9), Group())
        return True

    return draw_two


def counted_pair(drawer: Drawer, scope: Scope) -> bool:
    """Draw one node with two outputs."""
    if not scope.tensors:
        return False
    inputs = [drawer.pick(scope.tensors), drawer.pick(scope.tensors)]
    for value in inputs:
        value.group.changeable = False
    ndim = max(value.ndim for value in inputs)
    differentiable = any(value.differentiable for value in inputs) and not scope.quiet
    depth = 1 + max(value.depth for value in inputs) if differentiable else 0
    outputs = [Value(drawer.number(), ndim, Group(), differentiable, depth=depth) for _ in "ab"]
    scope.tensors += outputs
    numbers = tuple(value.number for value in inputs)
    scope.steps.append(Op("counted_pair", numbers, tuple(value.number for value in outputs)))
    return True


def gather(drawer: Drawer, scope: Scope) -> Value | None:
    """Draw one tensor from all unused ones that require grad, if there are any."""
    unused = scope.unused()
    return _add(drawer, scope, "gather", unused, 0, 0, Group()) if unused else None


def expand(drawer: Drawer, scope: Scope) -> bool:
    """Return a view whose elements share memory."""
    options = scope.of_ndim(0, 1)
    if not options or scope.quiet:
        return False
    x = drawer.pick(options)
    x.group.changeable = False
    value = _add(drawer, scope, "expand", [x], 2, 0, x.group)
    scope.tensors[-1] = value._replace(dense=False)
    return True


def embed(drawer: Drawer, scope: Scope) -> bool:
    """Rows of a matrix that is a parameter, with a sparse gradient."""
    options = [x for x in scope.of_ndim(2) if x.is_parameter and not x.group.changed]
    if not options:
        return False
    x = drawer.pick(options)
    _add(drawer, scope, "embed", [x], 2, drawer.random.randrange(9), Group())
    return True


def detach(drawer: Drawer, scope: Scope) -> bool:
    """Return the same memory without the graph."""
    if not scope.tensors:
        return False
    x = drawer.pick(scope.tensors)
    x.group.changeable = False
    _add(drawer, scope, "detach", [x], x.ndim, 0, x.group, differentiable=False)
    return True


def in_place(drawer: Drawer, scope: Scope) -> bool:
    """Change a tensor whose old values no other operation needs."""
    options = [x for x in scope.tensors if x.group.changeable and x.dense]
    if not options:
        return False
    x = drawer.pick(options)
    others = [y for y in scope.tensors if y.group is not x.group and y.ndim <= x.ndim]
    others = [y for y in others if x.differentiable or not y.differentiable]
    name = drawer.random.choice(("scale_", "mix_", "set_row_"))
    if name == "set_row_":
        others = [y for y in others if y.ndim < x.ndim]
    inputs = [x]
    if name != "scale_":
        if not others:
            return False
        inputs.append(drawer.pick(others))
    x.group.changed = True
    numbers = tuple(value.number for value in inputs)
    scope.steps.append(Op(name, numbers, (), drawer.random.randrange(9)))
    return True


def hook(drawer: Drawer, scope: Scope) -> bool:
    """Return a hook on a tensor that only this block has."""
    return _mark(drawer, scope, "hook")


def retain(drawer: Drawer, scope: Scope) -> bool:
    """`retain_grad` on a tensor that only this block has."""
    return _mark(drawer, scope, "retain")


def _mark(drawer: Drawer, scope: Scope, name: str) -> bool:
    options = [x for x in scope.tensors if x.differentiable and x.group.takes_hooks]
    if not options:
        return False
    x = drawer.pick(options)
    if name == "retain":
        x.group.changeable = False
    scope.steps.append(Op(name, (x.number,), (), drawer.random.randrange(9)))
    return True


def stash(drawer: Drawer, scope: Scope) -> bool:
    """Store a tensor on the worker, for later calls."""
    if not scope.tensors:
        return False
    x = drawer.pick(scope.tensors)
    x.group.changeable = False
    slot = drawer.slot()
    scope.slots[slot] = (scope.worker, x)
    scope.steps.append(Op("stash", (x.number,), (), slot))
    return True


def stashed(drawer: Drawer, scope: Scope) -> bool:
    """Use a tensor that another call stored."""
    options = [slot for slot, (worker, _) in scope.slots.items() if worker == scope.worker]
    if not options:
        return False
    slot = drawer.random.choice(options)
    number = drawer.number()
    scope.see(scope.slots[slot][1], number)
    scope.steps.append(Op("stashed", (), (number,), slot))
    return True


def _broadcast(x: int, y: int) -> int:
    return max(x, y)


def _matmul(x: int, y: int) -> int | None:
    return x + y - 2 if x and y else None


def _same_rows(x: int, y: int) -> int | None:
    return x if x == y and x else None


raises = _one("raises", NEW, 0, 1, 2)
half_blind = _two("half_blind", SAVES_INPUTS, _broadcast)

# Each with how often it is drawn.
_OPERATIONS: tuple[tuple[int, Draw], ...] = (
    (6, parameter),
    (1, fresh_leaf),
    (1, constant),
    (6, _two("add", NEW, _broadcast)),
    (5, _two("multiply", SAVES_INPUTS, _broadcast)),
    (3, _two("matmul", SAVES_INPUTS, _matmul)),
    (2, _two("shift", NEW, _same_rows)),
    (3, _one("tanh", SAVES_ALL, 0, 1, 2)),
    (2, _one("mean", NEW, 1, 2, result=0)),
    (2, _one("transpose", VIEW, 0, 1, 2)),
    (2, _one("row", VIEW, 1, 2, result=-1)),
    (1, _one("column", VIEW, 1, 2, result=-1)),
    (2, _one("select", NEW, 1, 2)),
    (1, expand),
    (2, detach),
    (5, _one("counted", SAVES_INPUTS, 0, 1, 2)),
    (3, counted_pair),
    (1, half_blind),
    (1, _one("checkpoint", SAVES_INPUTS, 0, 1, 2)),
    (4, in_place),
    (4, hook),
    (1, retain),
    (2, stash),
    (4, stashed),
)


# Each with how many programs have it.
_SELDOM: tuple[tuple[float, Draw], ...] = ((0.4, embed), (0.05, raises))


def mix(random: Random, *, without: Collection[Draw]) -> Sequence[Draw]:
    """Operations to draw from, but not these: a third is left out, so that programs differ."""
    chosen = [(weight, op) for weight, op in _OPERATIONS if random.random() < 0.67]
    chosen += [(2, op) for chance, op in _SELDOM if random.random() < chance]
    banned = set(without)
    if any(op is raises for _, op in chosen):
        banned.add(half_blind)  # whether a node behind it is run, and raises, is not defined
    mixed = [op for weight, op in chosen for _ in range(weight) if op not in banned]
    return mixed or [parameter]
