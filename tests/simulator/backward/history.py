"""Traces of forward passes: a random graph over workers, with sent and received tensors.

A node stands for a sum of its children with whole-number factors, so gradients are whole numbers
and are compared exactly. A received tensor is a node whose gradient goes to the sent one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple


class Node:
    """A node of the graph on one worker. Later nodes have higher numbers than what they come from.

    Attributes:
        next_functions: what it comes from, with factors.
        receive: the message it came in, if it is a received tensor.
        raises: whether its backward function raises.
    """

    __slots__ = ("next_functions", "number", "raises", "receive", "worker")

    def __init__(self, number: int, worker: int, children: Sequence[tuple[Node, int]]) -> None:
        self.number = number
        self.worker = worker
        self.next_functions = children
        self.receive: ReceivedNodes | None = None
        self.raises = False

    def __repr__(self) -> str:
        return f"n{self.number}"


class Leaf(Node):
    """A node where gradients end.

    Attributes:
        has_hooks: which must see its whole gradient.
    """

    __slots__ = ("has_hooks",)

    def __init__(self, number: int, worker: int) -> None:
        super().__init__(number, worker, ())
        self.has_hooks = False


class Edge(NamedTuple):
    """A place in the graph, as torch names it."""

    node: Node


class SentNodes:
    """Tensors whose gradients enter the graph: the roots, or those sent in one message."""

    def __init__(self, number: int, nodes: Sequence[Node]) -> None:
        self.number = number
        self.edges = [Edge(node) for node in nodes]


class ReceivedNodes:
    """Tensors that came in one message.

    Attributes:
        worker: that received them.
        sender: that sent them, with the number `number` of its own.
        nodes: one for each tensor.
    """

    __slots__ = ("nodes", "number", "sender", "worker")

    def __init__(self, worker: int, sender: int, number: int, nodes: Sequence[Node]) -> None:
        self.worker = worker
        self.sender = sender
        self.number = number
        self.nodes = nodes
        for node in nodes:
            node.receive = self

    def __repr__(self) -> str:
        return f"{self.sender}.{self.number}->{self.worker}"


class History:
    """The events in one autograd context before its backward passes.

    Attributes:
        creator: worker that made the context.
        nodes: by worker.
        sends: by worker and number: the nodes of the tensors that were sent.
        messages: sender and receiver of each, in order; every receiver knows the context
            from then on.
    """

    def __init__(self, creator: int) -> None:
        self.creator = creator
        self.nodes: dict[int, list[Node]] = {}
        self.sends: dict[int, dict[int, list[Node]]] = {}
        self.messages: list[tuple[int, int]] = []
        self._count = 0

    def add(self, worker: int, children: Sequence[tuple[Node, int]] = ()) -> Node:
        """Return a new node."""
        number = self._number()
        return self._keep(Node(number, worker, children) if children else Leaf(number, worker))

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _keep(self, node: Node) -> Node:
        self.nodes.setdefault(node.worker, []).append(node)
        return node

    def send(self, sender: int, worker: int, tensors: Sequence[Node]) -> ReceivedNodes:
        """Send a message with tensors from one worker to another."""
        sends = self.sends.setdefault(sender, {})
        number = len(sends) + 1
        sends[number] = list(tensors)
        self.messages.append((sender, worker))
        received = [self._keep(Node(self._number(), worker, ())) for _ in tensors]
        return ReceivedNodes(worker, sender, number, received)

    def receives(self) -> dict[Node, ReceivedNodes]:
        """Return the receive of each received tensor."""
        nodes = [node for nodes in self.nodes.values() for node in nodes]
        return {node: node.receive for node in nodes if node.receive is not None}

    def gradients(self, roots: Iterable[Node]) -> dict[Node, int]:
        """Return the right gradients of all nodes that these depend on."""
        totals: dict[Node, int] = {}
        for root in roots:
            totals[root] = totals.get(root, 0) + 1
        every = [node for nodes in self.nodes.values() for node in nodes]
        for node in sorted(every, key=lambda node: node.number, reverse=True):
            if node in totals:
                for child, factor in self._sources(node):
                    totals[child] = totals.get(child, 0) + factor * totals[node]
        return totals

    def _sources(self, node: Node) -> Sequence[tuple[Node, int]]:
        if node.receive is None:
            return node.next_functions
        sent = self.sends[node.receive.sender][node.receive.number]
        return [(sent[node.receive.nodes.index(node)], 1)]


def draw_history(random: Random, workers: int, happens: Callable[[], bool]) -> History:
    """Return a random history of workers 1 to `workers`, deep since new nodes use late ones.

    Args:
        random: draws it.
        workers: how many there are.
        happens: whether the next step that was drawn happens.
    """
    history = History(random.randint(1, workers))
    knowing = [history.creator]
    messages = random.uniform(0.2, 0.7)
    for _ in range(random.choice((4, 8, 15, 30, 50))):
        if not happens():
            continue
        worker = random.choice(knowing)
        nodes = history.nodes.get(worker, [])
        if not nodes or random.random() < 0.15:
            leaf = history.add(worker)
            assert isinstance(leaf, Leaf)
            leaf.has_hooks = random.random() < 0.1
        elif random.random() < messages:
            to = random.randint(1, workers)
            tensors = [_late(random, nodes) for _ in range(random.choice((1, 1, 2, 3)))]
            history.send(worker, to, tensors)
            knowing.append(to)
        else:
            children = [_late(random, nodes) for _ in range(random.choice((1, 2, 2, 3)))]
            history.add(worker, [(child, random.randint(1, 3)) for child in children])
    if not history.nodes.get(history.creator):
        history.add(history.creator)
    return history


def gather(history: History, worker: int) -> Node:
    """Return a new node at this worker that depends on everything."""
    every = [node for nodes in history.nodes.values() for node in nodes]
    used = {child for node in every for child, _ in node.next_functions}
    used.update(
        node for sends in history.sends.values() for sent in sends.values() for node in sent
    )
    found: list[Node] = []
    for where, nodes in list(history.nodes.items()):
        unused = [node for node in nodes if node not in used]
        if unused and where != worker:
            unused = list(history.send(where, worker, unused).nodes)
        found += unused
    return history.add(worker, [(node, 1) for node in found])


def _late(random: Random, nodes: Sequence[Node]) -> Node:
    return random.choice(nodes[-5:] if random.random() < 0.7 else nodes)
