"""The generator's knowledge of the values of a block while it draws the block's steps.

It has to know enough that a program means the same locally and distributed, in whatever order
calls end. Values that share memory form a group. Memory must not be changed in place any more once
another block can see it (it is a parameter, is stored, or is referred to), once a backward pass
needs it, or where torch forbids it. Others see the values that a block stores
only after some block has waited for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.gradients.program import Call, Op, Step

Slots = dict[int, tuple[int, "Value"]]  # stored values: worker and value, by number


MESSAGE_DEPTH = 2  # what a message adds to the depth of a value


class Group:
    """Values that share memory.

    Attributes:
        changeable: whether they may be changed in place.
        shared: whether other blocks may have hooks on them.
        changed: whether they were changed in place.
        aliased: whether there is more than one of them.
    """

    __slots__ = ("aliased", "changeable", "changed", "shared")

    def __init__(self, changeable: bool = True, shared: bool = False) -> None:
        self.changeable = changeable
        self.shared = shared
        self.changed = False
        self.aliased = False

    @property
    def takes_hooks(self) -> bool:
        """Return whether there may be a hook on one of them.

        torch 2.13 crashes when a hook is put on a view whose base was changed in place.
        """
        return not (self.shared or (self.changed and self.aliased))


class Value(NamedTuple):
    """A tensor of a block.

    Attributes:
        number: of the value in the program.
        ndim: dimensions.
        group: with which it shares memory.
        differentiable: whether it requires grad.
        dense: whether no two of its elements share memory.
        is_parameter: whether it is a parameter itself, perhaps of another worker.
        depth: steps and messages that it comes from, one after the other.
        origin: of values that are one and the same tensor, the number of the first; for a
            parameter, -1 minus its index. 0: it is the first.
    """

    number: int
    ndim: int
    group: Group
    differentiable: bool = True
    dense: bool = True
    is_parameter: bool = False
    depth: int = 0
    origin: int = 0

    @property
    def identity(self) -> int:
        """Equal for values that are one and the same tensor."""
        return self.origin or self.number


class Reference(NamedTuple):
    """A reference of a block.

    Attributes:
        number: of the value in the program.
        owner: worker where what it refers to lives.
        content: what it refers to, as the owner knows it.
        slots: what the function that makes it stores.
    """

    number: int
    owner: int
    content: tuple[Value | Reference, ...]
    slots: Slots


class Results(NamedTuple):
    """A call that has not been waited for: its number, results and what its function stores."""

    number: int
    content: tuple[Value | Reference, ...]
    slots: Slots


class Scope:
    """A block in the making.

    Attributes:
        worker: where it runs.
        depth: of calls above it.
        slots: stored values that it can rely on.
        quiet: whether it runs under `torch.no_grad`.
    """

    def __init__(self, worker: int, depth: int, slots: Slots, quiet: bool = False) -> None:
        self.worker = worker
        self.depth = depth
        self.slots = dict(slots)
        self.quiet = quiet
        self.steps: list[Step] = []
        self.tensors: list[Value] = []
        self.references: list[Reference] = []
        self.pending: list[Results] = []
        self.unsettled: list[Reference] = []
        self.made: list[Reference] = []

    def of_ndim(self, *ndims: int) -> list[Value]:
        """Return the scope's tensors with one of these numbers of dimensions."""
        return [value for value in self.tensors if value.ndim in ndims]

    def arrive(self, things: Sequence[Value | Reference], numbers: Sequence[int]) -> None:
        """Take over what came in one message, under new numbers.

        A tensor sent twice in a message arrives as one tensor; one that shares memory with itself
        arrives as such.
        """
        arrived: dict[int, Value] = {}
        for thing, number in zip(things, numbers, strict=True):
            if isinstance(thing, Reference):
                self.references.append(thing._replace(number=number))
                continue
            first = arrived.get(thing.identity)
            if first is None:
                first = arrived[thing.identity] = thing._replace(
                    number=number,
                    group=Group(changeable=thing.dense),
                    depth=thing.depth + MESSAGE_DEPTH if thing.differentiable else 0,
                    origin=0,
                )
            self.tensors.append(first._replace(number=number, origin=first.number))

    def see(self, value: Value, number: int) -> None:
        """Take over a tensor that is here already, under a new number."""
        group = Group(False, shared=True)
        self.tensors.append(value._replace(number=number, group=group, origin=value.identity))

    def unused(self) -> list[Value]:
        """Return the scope's tensors that require grad and that no other comes from."""
        used: set[int] = set()
        for step in self.steps:
            if isinstance(step, Call):
                used.update(step.args)
            elif isinstance(step, Op) and step.outputs:
                used.update(step.inputs)
        return [x for x in self.tensors if x.differentiable and x.number not in used]
