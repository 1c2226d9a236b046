"""What a worker records of an autograd context: what was sent, what was received, the gradients.

A *send* keeps where the sent tensors come from in this worker's graph. A *receive* makes each
tensor that arrived the output of a node of its own, where the local graph ends. The node is never
run: the backward pass asks for the gradient that reaches it, and sends that to the sender.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farcall.runtime.peers import Peer

LARGE_BYTES = 4096

# A node that raises when it is run, made in C++ at a fifth of the cost of a Python function's node.
_make_end = torch._C._functions.DelayedError


class Send(NamedTuple):
    """Tensors that this worker sent."""

    edges: tuple[GradientEdge, ...]


class Receive:
    """Tensors that this worker received in one message.

    Attributes:
        peer: who sent them.
        number: the sender's number for them.
        nodes: one for each of them, in the order of the message.
    """

    __slots__ = ("_context", "nodes", "number", "peer")

    def __init__(self, context: Context, peer: Peer, number: int) -> None:
        self._context = context
        self.peer = peer
        self.number = number
        self.nodes: list[Node] = []

    def attach(self, leaf: torch.Tensor) -> torch.Tensor:
        """The same data, as the output of a node of this receive."""
        explanation = (
            f"a tensor that came from worker {self.peer.name!r} belongs to autograd context "
            f"{self._context.id}: gradients flow through it only by "
            f"farcall.autograd.backward({self._context.id}, [loss]), while that context is open, "
            "and a second time only if retain_graph=True was given the first time"
        )
        with torch.enable_grad():
            tensor: torch.Tensor = _make_end(explanation, 1)(leaf)
        node = tensor.grad_fn
        assert node is not None
        if leaf.layout is torch.strided and leaf.nbytes >= LARGE_BYTES:
            # The node refers to the leaf, which would keep the memory until the context ends.
            leaf.data = leaf.new_empty(0)
        self.nodes.append(node)
        self._context.receives[node] = self
        return tensor


class Context:
    """One autograd context at one worker. Thread-safe.

    Attributes:
        id: the same on all workers.
        sends: by number.
        receives: by the nodes of their tensors.
        passes: backward passes that go on, or that failed, by id.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.sends: dict[int, Send] = {}
        self.receives: dict[Node, Receive] = {}
        self.passes: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    def record_send(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self.sends[number] = Send(tuple(map(get_gradient_edge, tensors)))

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the gradient of a leaf."""
        with self._lock:
            before = self._gradients.get(leaf)
            self._gradients[leaf] = gradient if before is None else add(before, gradient)

    def replace(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Set gradients of leaves."""
        with self._lock:
            self._gradients.update(gradients)

    def forget(self, sends: Sequence[int], receives: Sequence[Receive]) -> None:
        """A backward pass has used these up."""
        for number in sends:
            self.sends.pop(number, None)
        for receive in receives:
            for node in receive.nodes:
                self.receives.pop(node, None)


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, each dense or sparse. Neither is changed."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch adds a sparse tensor to a dense one, not the other way round
    return one + other
