"""The graph of one worker in one backward pass: what its sources reach, and running parts of it.

Nodes are torch's autograd nodes, sinks those where gradients leave this worker's graph: leaves and
received tensors. The graph is only read here; nothing is run but by `torch.autograd.grad`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farcall.autograd.records import add

Tensor = torch.Tensor

_LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def is_leaf(node: Node) -> bool:
    """Whether the node stands for a leaf tensor, `node.variable`."""
    return type(node) is _LEAF


class Exploration:
    """Finds what each source reaches. Not thread-safe.

    Attributes:
        is_shared: whether some node is reached by more than one source.
        sinks: source -> sinks that it is the first to reach.
    """

    def __init__(self, received: Collection[Node]) -> None:
        self.is_shared = False
        self.sinks: dict[int, list[Node]] = {}
        self._received = received
        self._seen: dict[Node, int] = {}

    def explore(self, source: int, edges: Sequence[GradientEdge]) -> list[Node]:
        """The sinks that a source reaches, but for those that others reached before."""
        seen, received = self._seen, self._received
        sinks: list[Node] = []
        self.sinks[source] = sinks
        stack = [edge.node for edge in edges]
        while stack:
            node = stack.pop()
            first = seen.get(node)
            if first is not None:
                if first != source:
                    self.is_shared = True
                continue
            seen[node] = source
            if node in received or type(node) is _LEAF:
                sinks.append(node)
                continue
            for child, _ in node.next_functions:
                if child is not None:
                    stack.append(child)
        return sinks


def run(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    sinks: Sequence[Node],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> list[Tensor | None]:
    """The gradients of the sinks, given those of the outputs. None: it is undefined."""
    given = [
        (edge, grad) for edge, grad in zip(outputs, gradients, strict=True) if grad is not None
    ]
    if not given:
        return [None] * len(sinks)
    return list(
        torch.autograd.grad(
            [edge for edge, _ in given],
            [GradientEdge(sink, 0) for sink in sinks],
            [grad for _, grad in given],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    )


def owned(leaf: Tensor, gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient for a leaf to keep: with the leaf's layout, in memory that is its alone.

    As torch's accumulation into `.grad` does; users and optimizers change gradients in place.

    Args:
        taken: addresses of memory that other leaves have; this one's is added.
    """
    if gradient.layout is torch.strided and leaf.layout is torch.strided:
        address = gradient.untyped_storage().data_ptr()
        if gradient.stride() != leaf.stride() or address in taken:
            gradient = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
            address = gradient.untyped_storage().data_ptr()
        taken.add(address)
    return gradient


class SharedGraph:
    """The graph of several sources that reach common nodes, run in parts. Not thread-safe.

    A part is what leads to sinks all of whose sources have their gradient. So every gradient enters
    it complete, and no node is run twice. At the *frontier*, where a node that is run has an input
    that is not run yet, the gradient of that input is kept for a later part.

    torch computes that gradient only if the input is asked for, and then calls the hooks of the
    tensor there. The hooks must see the whole gradient, which is not known yet. So we take the
    gradient from the node that is run, and let torch see zeros in its place: hooks at a frontier
    are called once more than in one process, with zeros, and what they return then is not used.

    Args:
        sources: the edges where gradients come in.
        received: nodes of received tensors.
    """

    def __init__(
        self, sources: Mapping[int, Sequence[GradientEdge]], received: Collection[Node]
    ) -> None:
        self._received = received
        self._kept: dict[GradientEdge, Tensor] = {}
        self._order = self._parents_first(edge.node for edges in sources.values() for edge in edges)
        self._left = {node for node in self._order if self._is_sink(node)}
        self.labels = self._label(sources)

    def _is_sink(self, node: Node) -> bool:
        return node in self._received or is_leaf(node)

    def _children(self, node: Node) -> Sequence[tuple[Node | None, int]]:
        return () if self._is_sink(node) else node.next_functions

    def _parents_first(self, roots: Iterable[Node]) -> list[Node]:
        done: list[Node] = []
        seen: set[Node] = set()
        for root in roots:
            stack = [(root, False)]
            while stack:
                node, is_left = stack.pop()
                if is_left:
                    done.append(node)
                elif node not in seen:
                    seen.add(node)
                    stack.append((node, True))
                    stack.extend(
                        (child, False)
                        for child, _ in self._children(node)
                        if child is not None and child not in seen
                    )
        done.reverse()
        return done

    def _label(self, sources: Mapping[int, Sequence[GradientEdge]]) -> dict[Node, list[int]]:
        """The sources that reach each sink."""
        numbers = list(sources)
        masks = dict.fromkeys(self._order, 0)
        for index, number in enumerate(numbers):
            for edge in sources[number]:
                masks[edge.node] |= 1 << index
        for node in self._order:
            mask = masks[node]
            for child, _ in self._children(node):
                if child is not None:
                    masks[child] |= mask
        return {
            sink: [number for index, number in enumerate(numbers) if masks[sink] >> index & 1]
            for sink in self._left
        }

    def keep(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> None:
        """Gradients came in."""
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                self._keep(edge, gradient)

    def _keep(self, edge: GradientEdge, gradient: Tensor) -> None:
        # Without the token that newer edges carry: the same place must be the same key.
        place = GradientEdge(edge.node, edge.output_nr)
        before = self._kept.get(place)
        self._kept[place] = gradient if before is None else add(before, gradient)

    def run(
        self, sinks: Sequence[Node], *, retain_graph: bool, create_graph: bool
    ) -> list[Tensor | None]:
        """The gradients of these sinks, all of whose sources have come in."""
        self._left.difference_update(sinks)
        needed = self._leading_to(set(sinks))
        outputs = [place for place in self._kept if place.node in needed]
        gradients = [self._kept.pop(place) for place in outputs]
        frontier = self._frontier(outputs, needed, set(sinks))
        thread = threading.get_ident()
        hooks = [
            node.register_hook(self._taker(thread, inputs)) for node, inputs in frontier.items()
        ]
        beyond = {place.node for inputs in frontier.values() for place in inputs.values()}
        try:
            found = run(
                outputs,
                gradients,
                [*sinks, *beyond],
                retain_graph=retain_graph,
                create_graph=create_graph,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return found[: len(sinks)]

    def _leading_to(self, sinks: set[Node]) -> set[Node]:
        leading = set(sinks)
        for node in reversed(self._order):
            if any(child in leading for child, _ in self._children(node)):
                leading.add(node)
        return leading

    def _frontier(
        self, outputs: Sequence[GradientEdge], needed: set[Node], sinks: set[Node]
    ) -> dict[Node, dict[int, GradientEdge]]:
        """Node that is run -> index of an input -> place whose gradient is kept for later."""
        useful = self._leading_to(self._left)
        active = {place.node for place in outputs}
        frontier: dict[Node, dict[int, GradientEdge]] = {}
        for node in self._order:
            if node not in active or node in sinks:
                continue
            for index, (child, slot) in enumerate(self._children(node)):
                if child is None:
                    continue
                if child in needed:
                    active.add(child)
                elif child in useful:
                    frontier.setdefault(node, {})[index] = GradientEdge(child, slot)
        return frontier

    def _taker(self, thread: int, inputs: Mapping[int, GradientEdge]) -> Any:
        def take(
            grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
        ) -> Sequence[Tensor | None] | None:
            # Another pass may run the same node now. (What is on a GPU runs in a thread of torch.)
            on_cpu = all(grad is None or grad.is_cpu for grad in grad_inputs)
            if on_cpu and threading.get_ident() != thread:
                return None
            seen = list(grad_inputs)
            for index, place in inputs.items():
                gradient = seen[index]
                if gradient is not None:
                    self._keep(place, gradient)
                    seen[index] = gradient.new_zeros(()).expand_as(gradient)
            return tuple(seen)

        return take
