"""The graph of one worker in one backward pass: what its sources reach, and running it.

A source is given by its entries: nodes where gradients come in. Sinks are the nodes where they
leave: leaves and exits. The graph is only read here; nodes are run by `torch.autograd.grad` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farcall.autograd.records import (
    BEHIND_EXITS,
    ENTRIES_BELOW,
    Traffic,
    index_of,
    node_behind,
    traffic,
)

Tensor = torch.Tensor

_LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def is_leaf(node: Node) -> bool:
    """Whether the node stands for a leaf tensor, `node.variable`."""
    return type(node) is _LEAF


class Exploration:
    """Finds what each source reaches. Not thread-safe.

    Attributes:
        entries: source -> the tensors whose nodes are its entries.
        sinks: source -> the sinks that it reaches, but for exits that others reached before.
        is_shared: whether something must see the gradients of several sources together: a node
            that more than one reaches, or the hooks of such a leaf. A leaf without hooks may be
            given its gradient in parts.
    """

    def __init__(self, exits: Collection[Node]) -> None:
        self.entries: dict[int, list[Tensor]] = {}
        self.sinks: dict[int, list[Node]] = {}
        self.is_shared = False
        self._exits = exits
        self._seen: dict[Node, int] = {}
        self._leaves: dict[Node, set[int]] = {}

    def explore(self, source: int, entries: Sequence[Tensor]) -> list[Node]:
        """More entries of a source: the sinks that they reach, and it did not reach before."""
        seen, exits = self._seen, self._exits
        sinks: list[Node] = []
        self.entries.setdefault(source, []).extend(entries)
        stack = [node_behind(entry) for entry in entries]
        while stack:
            node = stack.pop()
            if type(node) is _LEAF:
                if self._reach_leaf(source, node):
                    sinks.append(node)
                continue
            first = seen.get(node)
            if first is not None:
                self.is_shared |= first != source
                continue
            seen[node] = source
            if node in exits:
                sinks.append(node)
                continue
            for child, _ in node.next_functions:
                if child is not None:
                    stack.append(child)
        self.sinks.setdefault(source, []).extend(sinks)
        return sinks

    def _reach_leaf(self, source: int, node: Node) -> bool:
        """False if the source has reached the leaf before."""
        sources = self._leaves.setdefault(node, set())
        if source in sources:
            return False
        sources.add(source)
        if len(sources) > 1 and node.variable._backward_hooks:  # type: ignore[attr-defined]
            self.is_shared = True
        return True

    def make_first(self) -> None:
        """Let every node that can be run be run before any entry.

        Of the nodes that are ready torch runs the one with the highest number first. Entries have
        the numbers of their sources; all others get higher ones here, once.
        """
        for node in self._seen:
            number = node._sequence_nr()
            if number < ENTRIES_BELOW:
                node._set_sequence_nr(ENTRIES_BELOW + number)  # type: ignore[attr-defined]


class _Given:
    """The traffic of a run whose gradients are there; see `records.Traffic`."""

    def __init__(self, gradients: Mapping[int, Tensor | None]) -> None:
        self._gradients = gradients

    def enter(self, source: int, index: int) -> Tensor | None:
        return self._gradients.get(index)

    def leave(self, node: Node, gradient: Tensor | None) -> bool:
        return False  # exits of this pass are asked for, not run


def run(
    entries: Sequence[Tensor],
    gradients: Mapping[int, Tensor | None],
    sinks: Sequence[Node],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> list[Tensor | None]:
    """The gradients of the sinks, given those of a source's entries, by their indices.

    None: it is undefined.
    """
    given = [entry for entry in entries if gradients.get(index_of(entry)) is not None]
    if not given or not sinks:
        return [None] * len(sinks)
    found = _grad(given, sinks, _Given(gradients), retain_graph, create_graph)
    return list(found)


def _grad(
    entries: Sequence[Tensor],
    behind: Sequence[Node],
    handler: Traffic,
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` of nodes behind these entries, which get their gradients themselves.

    Not by its argument `grad_outputs`: that makes torch import sympy, which takes a second.
    """
    token = traffic.set(handler)
    try:
        with _leaving_nothing():
            found = torch.autograd.grad(
                entries,
                [GradientEdge(node, 0) for node in behind],
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
    finally:
        traffic.reset(token)
    if create_graph:
        return found
    # What somebody else has too, a backward function or another leaf, is theirs to change.
    own = range(len(found))
    return [found[i].clone() if _is_held_elsewhere(found, i) else found[i] for i in own]


def _is_held_elsewhere(found: Sequence[Tensor | None], index: int) -> bool:
    # One reference is the sequence's, one the argument's.
    return found[index] is not None and sys.getrefcount(found[index]) > 2


def run_shared(
    exploration: Exploration, handler: Traffic, *, retain_graph: bool, create_graph: bool
) -> dict[Node, Tensor | None]:
    """Run the graph of several sources that share nodes: as a whole, in this thread.

    So every node is run once, with its whole gradient, and hooks see what they see in one process.
    torch runs what it can, and only then an entry, that of the latest source first. There the
    handler waits for the gradient. By then the gradients of all exits that don't depend on it are
    complete, and were given to the handler.

    Returns:
        The gradients of the leaves. None: it is undefined.
    """
    exploration.make_first()
    sinks = dict.fromkeys(sink for found in exploration.sinks.values() for sink in found)
    leaves = [sink for sink in sinks if is_leaf(sink)]
    entries = [entry for found in exploration.entries.values() for entry in found]
    behind = [*leaves, get_gradient_edge(BEHIND_EXITS).node]
    # With one thread for all devices, since entries must come last on all of them.
    with torch.autograd.set_multithreading_enabled(False):
        found = _grad(entries, behind, handler, retain_graph, create_graph)
    return dict(zip(leaves, found, strict=False))


@contextmanager
def _leaving_nothing() -> Iterator[None]:
    """If a run fails, drop the nodes that torch did not get to.

    Each thread has a queue of nodes to run. After an error torch leaves what is in it, and all that
    hangs on that, until the thread runs a graph again. So we run one, whose node comes last.
    """
    try:
        yield
    except BaseException:
        with torch.enable_grad():
            start = torch.ones((), requires_grad=True)
            last = start * 1
        last.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
        torch.autograd.grad([last], [start])
        raise


def owned(leaf: Tensor, gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient for a leaf to keep: with the leaf's layout, in memory that is its alone.

    As torch's accumulation into `.grad` does; users and optimizers change gradients in place.

    Args:
        taken: addresses of memory that other leaves have; this one's is added.
    """
    if gradient.layout is torch.strided and leaf.layout is torch.strided:
        address = gradient.data_ptr()
        if address in taken or gradient.stride() != leaf.stride():
            gradient = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
            address = gradient.data_ptr()
        taken.add(address)
    return gradient
