"""The reach of sources at one worker: in the graph, and in which messages that came.

Sources must be run together if something waits for several of them (BWD-1): a node, a hook, or a
message. *Inputs*, in torch's words, are the nodes where gradients leave the graph: leaves, and
*recv nodes*, which stand for received tensors. See `passes` for sources, receives and parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Node = Any
Edge = Any
SentTensors = Any  # its `edges` have the `node` of each tensor
ReceivedTensors = Any  # its `nodes` are the recv nodes of its tensors


class Exploration(ABC):
    """Finds what each source reaches in the graph. Not thread-safe.

    Subclasses say of what kind of graph. As in torch's, `next_functions` of a node are pairs of
    what it comes from, or None, and a number.

    Args:
        recv_nodes: of the context.
        base: what others have found, to go on from. It is not changed.

    Attributes:
        live: source -> indices of its tensors that were explored.
        inputs: source -> the inputs that it reaches, as torch wants them, but for recv nodes that
            others reached before.
    """

    leaf: type[Any]  # nodes where gradients end

    @staticmethod
    @abstractmethod
    def edge(node: Any) -> Any:
        """Return an input, for the code that runs the graph; its `node` is this one."""

    @staticmethod
    @abstractmethod
    def has_hooks(leaf: Any) -> bool:
        """Return whether a leaf has hooks, which must see its whole gradient."""

    def __init__(self, recv_nodes: Collection[Node], base: Exploration | None = None) -> None:
        self.live: dict[SentTensors, list[int]] = {}
        self.inputs: dict[SentTensors, list[Edge]] = {}
        self._recv_nodes = recv_nodes
        self._base = base
        self._seen: dict[Node, SentTensors] = {}
        self._leaves: dict[Node, SentTensors] = {}  # the first that reached it
        self._others: dict[Node, set[SentTensors]] = {}  # all others that did
        self._shares_node = False

    @property
    def is_shared(self) -> bool:
        """Return whether something must see the gradients of several sources together.

        That is a node that more than one reaches, or the hooks of such a leaf. A leaf without hooks
        may be given its gradient in parts.
        """
        if self._base is not None and self._base.is_shared:
            return True
        return self._shares_node or any(map(self.has_hooks, self._others))

    def explore(self, source: SentTensors, live: Iterable[int]) -> list[Edge]:
        """Explore more tensors of a source; return the inputs that they are the first to reach."""
        seen, recv_nodes, leaf, edge = self._seen, self._recv_nodes, self.leaf, self.edge
        base = {} if self._base is None else self._base._seen
        inputs: list[Edge] = []
        edges = source.edges
        explored = self.live.setdefault(source, [])
        stack = []
        for index in live:
            explored.append(index)
            stack.append(edges[index].node)
        while stack:
            node = stack.pop()
            if type(node) is leaf:
                if self._is_new_leaf(source, node):
                    inputs.append(edge(node))
                continue
            first = seen.get(node) or base.get(node)
            if first is not None:
                self._shares_node |= first is not source
                continue
            seen[node] = source
            if node in recv_nodes:
                inputs.append(edge(node))
                continue
            for child, _ in node.next_functions:
                if child is not None:
                    stack.append(child)
        self.inputs.setdefault(source, []).extend(inputs)
        return inputs

    def _is_new_leaf(self, source: SentTensors, node: Node) -> bool:
        """Return whether the source has not reached a leaf before."""
        first = self._leaves.get(node)
        if first is None and self._base is not None:
            first = self._base._leaves.get(node)
        if first is None:
            self._leaves[node] = source
            return True
        if first is source or source in self._others.get(node, ()):
            return False
        self._others.setdefault(node, set()).add(source)
        return True


class Reach:
    """The reach of sources, and the messages in which that came. Not thread-safe.

    Args:
        receives: of the context: exit -> the message it belongs to.
        base: what others reach, to go on from. It is not changed.

    Attributes:
        exploration: of the graph.
        reached: the recv_nodes of each receive that are reached, and by which source.
    """

    explorer: type[Exploration]
    exploration: Any

    def __init__(self, receives: Mapping[Node, ReceivedTensors], base: Reach | None = None) -> None:
        explored = None if base is None else base.exploration
        self.exploration = self.explorer(receives, explored)
        self.reached: dict[ReceivedTensors, dict[Node, SentTensors]] = {}
        self._receives = receives
        self._base = base
        self._is_message_shared: bool = base is not None and base._is_message_shared

    @property
    def is_shared(self) -> bool:
        """Return whether something waits for several sources: a node, hook, or message to send."""
        return self._is_message_shared or self.exploration.is_shared

    def explore(self, source: SentTensors, live: Iterable[int]) -> list[tuple[Any, ...]]:
        """Parts of a source are live: the parts of receives that are reached now, as the first.

        A part is a receive, and indices of its tensors.
        """
        found: dict[ReceivedTensors, list[int]] = {}
        for input_ in self.exploration.explore(source, live):
            node = input_.node
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
