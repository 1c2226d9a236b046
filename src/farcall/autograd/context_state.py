"""The state of an autograd context at one worker: its records, the gradients, the passes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from farcall.autograd.graph import GraphReach
from farcall.autograd.nodes import ReceivedTensors, SentTensors, plain, with_grad

Tensor = torch.Tensor
Gradient = tuple[Tensor, Tensor]  # a leaf, and its gradient
Gradients = dict[int, Gradient]  # by the id of the leaf: hashing a tensor takes many times as long
COPIED_BYTES = 4096  # copying so much takes less time than recording


class Context:
    """One autograd context at one worker. Thread-safe.

    Attributes:
        id: the same on all workers.
        receives: by the nodes of their tensors.
        passes: backward passes that took place here, by id.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.receives: dict[Node, ReceivedTensors] = {}
        self.passes: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._gradients: Gradients = {}
        # Sent tensors are recorded when they are on their way: nothing else changes them then.
        self._unrecorded: dict[int, Sequence[Tensor]] = {}
        self._sources: dict[int, SentTensors] = {}
        self._reach: GraphReach | None = None  # what all that leads to

    # Sent tensors.

    def announce(self, number: int, tensors: Sequence[Tensor], waits: bool = False) -> None:
        """Note that a message with these tensors is about to be sent: `record` records them, later.

        If they may be changed in place by then, small ones are copied, and large ones recorded now.
        That is not needed if the sending thread `waits` until they are recorded.
        """
        if not waits:
            for tensor in tensors:
                if tensor.layout is not torch.strided or tensor.nbytes > COPIED_BYTES:
                    source = SentTensors(number, tensors)
                    with self._lock:
                        self._add(source)
                    return
            tensors = with_grad(_copies, tensors)
        with self._lock:
            self._unrecorded[number] = tensors

    def record(self, number: int) -> None:
        """Record a message that is on its way. No effect if the record was needed already."""
        with self._lock:
            self._record(number)

    def _record(self, number: int) -> None:
        tensors = self._unrecorded.pop(number, None)
        if tensors is not None:
            self._add(SentTensors(number, tensors))

    def _add(self, source: SentTensors) -> None:
        self._sources[source.number] = source
        self._reach = self._reach or GraphReach(self.receives)
        self._reach.explore(source, range(len(source.edges)))

    def source(self, number: int) -> SentTensors | None:
        """Return the tensors that were sent with this number."""
        with self._lock:
            self._record(number)
            return self._sources.get(number)

    def sources(self) -> list[SentTensors]:
        """Return all that was sent."""
        with self._lock:
            for number in list(self._unrecorded):
                self._record(number)
            return list(self._sources.values())

    def reach(self, roots: SentTensors | None) -> tuple[GraphReach, GraphReach, bool]:
        """Return the reach of all that was sent and of these roots, and whether any is shared."""
        with self._lock:
            for number in list(self._unrecorded):
                self._record(number)
            reach = self._reach or GraphReach(self.receives)
            if roots is None:
                return reach, reach, reach.is_shared
            of_roots = GraphReach(self.receives, reach)
            of_roots.explore(roots, range(len(roots.edges)))
            return reach, of_roots, of_roots.is_shared

    # Gradients.

    def gradients(self) -> dict[Tensor, Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self._lock:
            return dict(self._gradients.values())

    def gradient_of(self, leaf: Tensor) -> Tensor | None:
        """Return the gradient of one leaf, if there is one."""
        found = self._gradients.get(id(leaf))
        return None if found is None else found[1]

    def accumulate(self, gradients: Iterable[Gradient]) -> None:
        """Add to the gradients of leaves."""
        with self._lock:
            accumulate(self._gradients, gradients)

    def replace(self, gradients: Iterable[Gradient]) -> None:
        """Set gradients of leaves."""
        with self._lock:
            self._gradients.update((id(gradient[0]), gradient) for gradient in gradients)

    def clear(self) -> None:
        """Let go of everything: the context has ended."""
        with self._lock:
            kept = (self._unrecorded, self._sources, self._reach, self._gradients, self.passes)
            self._unrecorded, self._sources, self._reach = {}, {}, None
            self._gradients, self.passes = {}, {}
        del kept  # not under the lock: destructors of its values may be the user's
        self.receives.clear()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [(tensor if type(tensor) is Tensor else plain(tensor)).clone() for tensor in tensors]


def accumulate(to: Gradients, gradients: Iterable[Gradient]) -> None:
    """Add gradients of leaves to others. No tensor is changed."""
    for leaf, gradient in gradients:
        before = to.get(id(leaf))
        to[id(leaf)] = leaf, gradient if before is None else add(before[1], gradient)


def add(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients, each dense or sparse. Neither is changed."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch adds a sparse tensor to a dense one, not the other way round
    return one + other
