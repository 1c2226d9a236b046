"""What sources reach at one worker: in the graph, and in which messages that came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from farcall.autograd import graph
from farcall.autograd.records import Context, Receive

Tensor = torch.Tensor


class Reach:
    """What sources reach, and in which messages that came. Not thread-safe.

    Attributes:
        exploration: of the graph.
        reached: the exits of each receive that are reached, and by which source.
    """

    def __init__(self, context: Context) -> None:
        self.exploration = graph.Exploration(context.receives)
        self.reached: dict[Receive, dict[Node, int]] = {}
        self._receives = context.receives
        self._is_message_shared = False

    @property
    def is_shared(self) -> bool:
        """Whether something waits for several sources: a node, a hook, or a message to be sent."""
        return self.exploration.is_shared or self._is_message_shared

    def explore(
        self, source: int, entries: Sequence[Tensor], live: Sequence[int]
    ) -> list[tuple[Any, ...]]:
        """Parts of a source are live: the parts of receives that are reached now, as the first.

        A part is a receive, and indices of its tensors.
        """
        found: dict[Receive, list[int]] = {}
        for node in self.exploration.explore(source, [entries[index] for index in live]):
            receive = self._receives.get(node)
            if receive is not None:
                found.setdefault(receive, []).append(receive.nodes.index(node))
                sources = self.reached.setdefault(receive, {})
                sources[node] = source
                self._is_message_shared |= len(set(sources.values())) > 1
        return [(receive, *used) for receive, used in found.items()]
