"""What sources reach at one simulated worker; the counterpart of `farcall.autograd.reach`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from farcall.testing.backward.history import Node, Receive


class Reach:
    """What sources reach.

    Attributes:
        entries: of each source: the indices of its tensors, and their nodes.
        received: the tensors of each receive that are reached, and by which source.
        is_shared: whether some node, or some message, waits for several sources.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, Node]]] = {}
        self.received: dict[Receive, dict[Node, int]] = {}
        self.is_shared = False
        self._seen: dict[Node, int] = {}

    def explore(
        self, source: int, nodes: Sequence[Node], live: Iterable[int]
    ) -> list[tuple[Any, ...]]:
        """Parts of a source: the parts of receives that are reached now, as the first.

        A part is a receive, and indices of its tensors.
        """
        entries = [(index, nodes[index]) for index in live]
        self.entries.setdefault(source, []).extend(entries)
        found: dict[Receive, list[int]] = {}
        stack = [node for _, node in entries]
        while stack:
            node = stack.pop()
            if node.is_leaf:  # may get its gradient in parts
                continue
            first = self._seen.get(node)
            if first is not None:
                self.is_shared |= first != source
                continue
            self._seen[node] = source
            if node.receive is not None:
                found.setdefault(node.receive, []).append(node.receive.nodes.index(node))
                sources = self.received.setdefault(node.receive, {})
                sources[node] = source
                self.is_shared |= len(set(sources.values())) > 1
            stack += [child for child, _ in node.children]
        return [(receive, *used) for receive, used in found.items()]


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
                stack += [child for child, _ in node.children]

    def give(self, node: Node, gradient: int) -> list[Node]:
        """Add to the gradient of a node; itself, when that is complete."""
        self.totals[node] = self.totals.get(node, 0) + gradient
        self._left[node] -= 1
        return [] if self._left[node] else [node]
