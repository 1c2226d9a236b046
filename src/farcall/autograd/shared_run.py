"""What a run of all sources of a worker does at its entries and exits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from farcall.autograd.records import Source

if TYPE_CHECKING:
    from farcall.autograd.passes import Pass

Tensor = torch.Tensor


class SharedRun:
    """The traffic of a run of all sources; see `records.Traffic`. For one thread."""

    def __init__(self, backward: Pass) -> None:
        self._pass = backward
        self._sources = iter(backward.live)
        self._last = backward.live[-1]
        self._running: Source | None = None  # the source whose gradient came last
        self._arrived: dict[Node, Tensor | None] = {}

    def enter(self, source: int, index: int) -> Tensor | None:
        while self._running is None or self._running.number != source:
            self._go_on()
        return self._pass.wait_for(self._running).get(index)

    def _go_on(self) -> None:
        """To the next source. What the last one set off at this worker is done."""
        if self._running is not None:
            self._pass.ran(self._running)
        self._running = next(self._sources)
        self._pass.wait_for(self._running)

    def leave(self, node: Node, gradient: Tensor | None) -> bool:
        found = self._pass.message_of(node)
        if found is None:
            return False
        receive, others = found
        self._arrived[node] = gradient
        if self._running is not None and all(other in self._arrived for other in others):
            self._pass.send(self._running, receive, self._arrived)
        return True

    def finish(self) -> None:
        """The run is over. Sources that lead nowhere were not asked for."""
        while self._running is not self._last:
            self._go_on()
        assert self._running is not None
        self._pass.ran(self._running)
