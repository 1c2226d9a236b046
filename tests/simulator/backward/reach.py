"""The reach of sources in a simulated graph, and adding up gradients in it."""

from __future__ import annotations

from collections.abc import Sequence

from farcall.protocol.reachability import Exploration, Reach
from simulator.backward.history import Edge, Leaf, Node


class SimulatedExploration(Exploration):
    """Of simulated nodes."""

    leaf = Leaf
    edge = Edge

    @staticmethod
    def has_hooks(leaf: Leaf) -> bool:
        return leaf.has_hooks


class SimulatedReach(Reach):
    """Of simulated nodes and receives."""

    explorer = SimulatedExploration


class Sums:
    """Gradients of nodes, while a run from these adds them up."""

    def __init__(self, entries: Sequence[Node]) -> None:
        self.totals: dict[Node, int] = {}
        self._left: dict[Node, int] = {}  # how many gradients each node still gets
        stack = list(entries)
        while stack:
            node = stack.pop()
            self._left[node] = self._left.get(node, 0) + 1
            if self._left[node] == 1:
                stack += [child for child, _ in node.next_functions]

    def give(self, node: Node, gradient: int) -> list[Node]:
        """Add to the gradient of a node; itself, when that is complete."""
        self.totals[node] = self.totals.get(node, 0) + gradient
        self._left[node] -= 1
        return [] if self._left[node] else [node]
