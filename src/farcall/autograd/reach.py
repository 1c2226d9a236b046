"""What sources reach at one worker: in the graph, and in which messages that came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd.graph import Node

from farcall.autograd import graph
from farcall.autograd.records import Receive, Source


class Reach:
    """What sources reach, and in which messages that came. Not thread-safe.

    Args:
        receives: of the context: exit -> the message it belongs to.
        base: what others reach, to go on from. It is not changed.

    Attributes:
        exploration: of the graph.
        reached: the exits of each receive that are reached, and by which source.
    """

    def __init__(self, receives: Mapping[Node, Receive], base: Reach | None = None) -> None:
        explored = None if base is None else base.exploration
        self.exploration: graph.Exploration = graph.Exploration(receives, explored)
        self.reached: dict[Receive, dict[Node, Source]] = {}
        self._receives = receives
        self._base = base
        self._is_message_shared: bool = base is not None and base._is_message_shared

    @property
    def is_shared(self) -> bool:
        """Whether something waits for several sources: a node, a hook, or a message to be sent."""
        return self._is_message_shared or self.exploration.is_shared

    def explore(self, source: Source, live: Iterable[int]) -> list[tuple[Any, ...]]:
        """Parts of a source are live: the parts of receives that are reached now, as the first.

        A part is a receive, and indices of its tensors.
        """
        found: dict[Receive, list[int]] = {}
        for sink in self.exploration.explore(source, live):
            node = sink.node
            receive = self._receives.get(node)
            if receive is not None:
                found.setdefault(receive, []).append(receive.nodes.index(node))
                sources = self.reached.setdefault(receive, {})
                sources[node] = source
                reached_by = set(sources.values())
                if self._base is not None:
                    reached_by.update(self._base.reached.get(receive, {}).values())
                self._is_message_shared |= len(reached_by) > 1
        return [(receive, *used) for receive, used in found.items()]
