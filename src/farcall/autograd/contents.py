"""What an autograd context holds at one worker: its records, the gradients, the passes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from farcall.autograd.reach import Reach
from farcall.autograd.records import Receive, Source

Tensor = torch.Tensor


class Context:
    """One autograd context at one worker. Thread-safe.

    Attributes:
        id: the same on all workers.
        receives: by the nodes of their tensors.
        passes: backward passes that took place here, by id.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.receives: dict[Node, Receive] = {}
        self.passes: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._gradients: dict[Tensor, Tensor] = {}
        # What is sent is recorded after it was sent: what is there to do takes a while.
        self._recorded = threading.Condition(self._lock)
        self._unrecorded: set[int] = set()
        self._sources: dict[int, Source] = {}
        self._reach = Reach(self.receives)

    # What was sent.

    def announce(self, number: int) -> None:
        """A message with tensors is about to be sent; `record` follows, whatever happens."""
        with self._lock:
            self._unrecorded.add(number)

    def record(self, number: int, tensors: Sequence[Tensor]) -> None:
        """These were sent, as they are now."""
        try:
            source = Source(number, tensors)
            with self._lock:
                self._sources[number] = source
                self._reach.explore(source, range(len(tensors)))
        finally:
            with self._lock:
                self._unrecorded.discard(number)
                self._recorded.notify_all()

    def source(self, number: int) -> Source | None:
        """What was sent with this number."""
        source = self._sources.get(number)
        if source is None:
            with self._lock:
                self._recorded.wait_for(lambda: number not in self._unrecorded)
                source = self._sources.get(number)
        return source

    def sources(self) -> list[Source]:
        """All that was sent."""
        with self._lock:
            self._recorded.wait_for(lambda: not self._unrecorded)
            return list(self._sources.values())

    def reach(self, roots: Source | None) -> tuple[Reach, bool]:
        """What all that was sent leads to, with these roots; and whether any of it is shared."""
        with self._lock:
            self._recorded.wait_for(lambda: not self._unrecorded)
            reach = self._reach
            if roots is not None:
                reach = reach.copy()
                reach.explore(roots, range(len(roots.edges)))
            return reach, reach.is_shared

    # Gradients.

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
        self.receives.clear()
        self.passes = {}
        with self._lock:
            self._sources, self._reach, self._gradients = {}, Reach({}), {}


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
