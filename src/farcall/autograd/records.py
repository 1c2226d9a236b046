"""What a worker records of an autograd context: what was sent, what was received, the gradients.

Each tensor that is sent becomes the input of a node of its own, where its gradient enters the local
graph: an *entry*. Each tensor that arrives becomes the output of a node of its own, where the local
graph ends: an *exit*. Most passes only use the places of these nodes. When a pass runs them, they
do what the `Traffic` of the running thread says.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from farcall.runtime.peers import Peer

Tensor = torch.Tensor

# Entries have lower numbers than all other nodes, see `graph.Exploration.make_first`.
ENTRIES_BELOW = 1 << 40


class Traffic(Protocol):
    """What entries and exits do in a thread that runs them."""

    def enter(self, source: int, index: int) -> Tensor | None:
        """The gradient of a tensor that was sent: it is waited for."""

    def leave(self, node: Node, gradient: Tensor | None) -> bool:
        """The gradient of a tensor that arrived is complete. False: it is none of this pass."""


traffic: ContextVar[Traffic | None] = ContextVar("farcall_traffic", default=None)

# An exit is run only if something behind it is asked for.
BEHIND_EXITS = torch.empty(0, requires_grad=True)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, index: int) -> Tensor:
        ctx.place = source, index
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        current = traffic.get()
        assert current is not None
        return current.enter(*ctx.place), None, None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, behind: Tensor, arrived: Tensor, explanation: Any) -> Tensor:
        ctx.explanation = explanation
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(arrived)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        current = traffic.get()
        if current is None or not current.leave(ctx, gradient):
            raise RuntimeError(ctx.explanation())
        return None, None, None


def make_entries(source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each tensor, as it is now: a tensor whose node is its entry."""
    with torch.enable_grad():
        made: list[Tensor] = [
            _Entry.apply(tensor, source, index)  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
        ]
    for entry in made:
        entry.grad_fn._set_sequence_nr(source % ENTRIES_BELOW)  # type: ignore[union-attr]
    return made


def index_of(entry: Tensor) -> int:
    """Where the tensor behind an entry stood in its message."""
    index: int = entry.grad_fn.place[1]  # type: ignore[union-attr]
    return index


def node_behind(entry: Tensor) -> Node:
    """The node of the tensor behind an entry."""
    node: Node = entry.grad_fn.next_functions[0][0]  # type: ignore[union-attr, assignment]
    return node


class Receive:
    """Tensors that this worker received in one message.

    Attributes:
        peer: who sent them.
        number: the sender's number for them.
        nodes: their exits, in the order of the message.
    """

    __slots__ = ("_context", "nodes", "number", "peer")

    def __init__(self, context: Context, peer: Peer, number: int) -> None:
        self._context = context
        self.peer = peer
        self.number = number
        self.nodes: list[Node] = []

    def attach(self, leaf: Tensor) -> Tensor:
        """The same tensor, as the output of an exit of this receive."""
        with torch.enable_grad():
            arrived = leaf.detach()
            explain = partial(_explain, self.peer.name, self._context.id)
            _Exit.apply(BEHIND_EXITS, arrived, explain)  # type: ignore[no-untyped-call]
        node = arrived.grad_fn
        assert node is not None
        self.nodes.append(node)
        self._context.receives[node] = self
        return arrived


def _explain(worker: str, context: int) -> str:
    return (
        f"a tensor that came from worker {worker!r} belongs to autograd context {context}: "
        f"gradients flow through it only by farcall.autograd.backward({context}, [loss]), while "
        "that context is open, and a second time only if retain_graph=True was given the first time"
    )


class Context:
    """One autograd context at one worker. Thread-safe.

    Attributes:
        id: the same on all workers.
        sends: by number: tensors whose nodes are the entries of a message, in its order.
        receives: by the nodes of their tensors.
        passes: backward passes that go on, or that failed, by id.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.sends: dict[int, list[Tensor]] = {}
        self.receives: dict[Node, Receive] = {}
        self.passes: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._gradients: dict[Tensor, Tensor] = {}

    def record_send(self, number: int, tensors: Sequence[Tensor]) -> None:
        self.sends[number] = make_entries(number, tensors)

    def gradients(self) -> dict[Tensor, Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add to the gradients of leaves."""
        with self._lock:
            accumulate(self._gradients, gradients)

    def replace(self, gradients: dict[Tensor, Tensor]) -> None:
        """Set gradients of leaves."""
        with self._lock:
            self._gradients.update(gradients)

    def clear(self) -> None:
        """The context ended: let go of everything."""
        self.sends, self.receives, self.passes = {}, {}, {}
        with self._lock:
            self._gradients = {}


def accumulate(to: dict[Tensor, Tensor], gradients: Mapping[Tensor, Tensor]) -> None:
    """Add gradients of leaves to others. No tensor is changed."""
    for leaf, gradient in gradients.items():
        before = to.get(leaf)
        to[leaf] = gradient if before is None else add(before, gradient)


def add(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, each dense or sparse. Neither is changed."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch adds a sparse tensor to a dense one, not the other way round
    return one + other
