"""The work of a run of all sources of a worker at its send and recv nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from farcall.autograd.ports import RunningPass

Tensor = torch.Tensor


class SharedRun:
    """The traffic of a run of all sources; see `nodes.Traffic`. For one thread."""

    def __init__(self, backward: RunningPass, sources: Sequence[int]) -> None:
        self._pass = backward
        self._sources = iter(sources)
        self._last = sources[-1]
        self._running: int | None = None  # the source whose gradient came last
        self._arrived: dict[Node, Tensor | None] = {}

    def enter(self, source: int, index: int) -> Tensor | None:
        while self._running != source:
            self._go_on()
        return self._pass.wait_for(source).get(index)

    def _go_on(self) -> None:
        """Go on to the next source. The work of the last one at this worker is done."""
        if self._running is not None:
            self._pass.ran(self._running)
        self._running = next(self._sources)
        self._pass.wait_for(self._running)

    def leave(self, node: Node, gradient: Tensor | None) -> bool:
        receive = self._pass.receive_of(node)
        if receive is None:
            return False
        assert self._running is not None, "a recv node has its gradient from a send node"
        self._arrived[node] = gradient
        self._pass.left(self._running, receive, self._arrived)
        return True

    def finish(self) -> None:
        """End the run, with the sources that torch did not ask for: those that lead nowhere."""
        while self._running != self._last:
            self._go_on()
        self._pass.ran(self._last)
