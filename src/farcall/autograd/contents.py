"""What an autograd context holds at one worker: its records, the gradients, the passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from farcall.autograd.reach import Reach
from farcall.autograd.records import Receive, Source

Tensor = torch.Tensor
Gradient = tuple[Tensor, Tensor]  # a leaf, and its gradient
Gradients = dict[int, Gradient]  # by the id of the leaf: hashing a tensor takes many times as long


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
        self._gradients: Gradients = {}
        # What is sent is recorded after it was sent: what is there to do takes a while.
        self._unrecorded: set[int] = set()
        self._recorded: threading.Condition | None = None  # if somebody waits for that
        self._sources: dict[int, Source] = {}
        self._reach: Reach | None = None  # what all that leads to

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
                self._reach = self._reach or Reach(self.receives)
                self._reach.explore(source, range(len(tensors)))
        finally:
            with self._lock:
                self._unrecorded.discard(number)
                if self._recorded is not None:
                    self._recorded.notify_all()

    def source(self, number: int) -> Source | None:
        """What was sent with this number."""
        source = self._sources.get(number)
        if source is None:
            with self._lock:
                self._wait(lambda: number not in self._unrecorded)
                source = self._sources.get(number)
        return source

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until what is on its way is recorded. Lock held."""
        if not condition():
            if self._recorded is None:
                self._recorded = threading.Condition(self._lock)
            self._recorded.wait_for(condition)

    def sources(self) -> list[Source]:
        """All that was sent."""
        with self._lock:
            self._wait(lambda: not self._unrecorded)
            return list(self._sources.values())

    def reach(self, roots: Source | None) -> tuple[Reach, bool]:
        """What all that was sent leads to, with these roots; and whether any of it is shared."""
        with self._lock:
            self._wait(lambda: not self._unrecorded)
            reach = self._reach or Reach(self.receives)
            if roots is not None:
                reach = reach.copy()
                reach.explore(roots, range(len(roots.edges)))
            return reach, reach.is_shared

    # Gradients.

    def gradients(self) -> dict[Tensor, Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self._lock:
            return dict(self._gradients.values())

    def gradient_of(self, leaf: Tensor) -> Tensor | None:
        """The gradient of one leaf, if there is one."""
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
        """The context ended: let go of everything."""
        self.receives.clear()
        self.passes = {}
        with self._lock:
            self._sources, self._reach, self._gradients = {}, None, {}


def accumulate(to: Gradients, gradients: Iterable[Gradient]) -> None:
    """Add gradients of leaves to others. No tensor is changed."""
    for leaf, gradient in gradients:
        before = to.get(id(leaf))
        to[id(leaf)] = leaf, gradient if before is None else add(before[1], gradient)


def add(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, each dense or sparse. Neither is changed."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch adds a sparse tensor to a dense one, not the other way round
    return one + other
