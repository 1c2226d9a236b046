"""The graph of one worker in one backward pass: what its sources reach, and running it.

The inputs of a run, in the words of `torch.autograd.grad`, are the nodes where gradients leave the
graph: leaves and recv nodes. The graph is only read here; nodes are run by torch's engine alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farcall import torch_internals as internals
from farcall.autograd.nodes import BEHIND_EDGE, SEND_NODES_BELOW, SentTensors, Traffic, traffic
from farcall.protocol.reachability import Exploration, Reach

Tensor = torch.Tensor

# Of nodes that stand for a leaf tensor, `node.variable`.
_LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
# torch.autograd.grad calls this in the end. Its own checks take longer than a small graph, and its
# argument `grad_outputs` makes it import sympy, which takes a second.
_run_backward: Any = internals.execution_engine.run_backward


class GraphExploration(Exploration):
    """Of torch's nodes."""

    leaf = _LEAF

    @staticmethod
    def edge(node: Node) -> GradientEdge:
        return GradientEdge(node, 0)

    @staticmethod
    def has_hooks(leaf: Any) -> bool:
        return bool(internals.backward_hooks(leaf.variable))

    def make_first(self) -> None:
        """Let every node that can be run be run before any send node.

        Of the nodes that are ready torch runs the one with the highest number first. Send nodes
        have the numbers of their sources; all others get higher ones here, once.
        """
        for node in self._seen:
            number = internals.sequence_nr(node)()
            if number < SEND_NODES_BELOW:
                internals.set_sequence_nr(node)(SEND_NODES_BELOW + number)


class GraphReach(Reach):
    """Of torch's nodes, and `nodes.ReceivedTensors`."""

    explorer = GraphExploration
    exploration: GraphExploration


def run(
    source: SentTensors,
    gradients: Mapping[int, Tensor | None],
    inputs: Sequence[GradientEdge],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs, given those of a source's tensors, by their indices.

    None is an undefined gradient.
    """
    edges = []
    given = []
    for index, gradient in gradients.items():
        if gradient is not None:
            edges.append(source.edges[index])
            given.append(gradient)
    if not edges or not inputs:
        return [None] * len(inputs)
    return _grad(edges, given, inputs, retain_graph, create_graph)


def _grad(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[GradientEdge],
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[Tensor | None]:
    """Do the work of `torch.autograd.grad`."""
    try:
        found: tuple[Tensor | None, ...] = _run_backward(
            tuple(roots),
            tuple(gradients),
            retain_graph,
            create_graph,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    except BaseException:
        _leave_nothing()
        raise
    return found


def run_shared(
    exploration: GraphExploration, handler: Traffic, *, retain_graph: bool, create_graph: bool
) -> tuple[list[GradientEdge], Sequence[Tensor | None]]:
    """Run the graph of several sources that share nodes: as a whole, in this thread.

    So every node is run once, with its whole gradient, and hooks see what they see in one process.
    torch runs what it can, and only then a send node, that of the latest source first. There the
    handler waits for the gradient. By then the gradients of all recv nodes that don't depend on it
    are complete, and were given to the handler.

    Returns:
        The leaves that were reached, and at least as many gradients; None is an undefined one.
    """
    exploration.make_first()
    leaves: dict[Node, GradientEdge] = {}
    for inputs in exploration.inputs.values():
        leaves.update((input_.node, input_) for input_ in inputs if type(input_.node) is _LEAF)
    outputs = [
        source.outputs()[index] for source, live in exploration.live.items() for index in live
    ]
    edges = [get_gradient_edge(output) for output in outputs]
    behind = [*leaves.values(), BEHIND_EDGE]
    token = traffic.set(handler)
    try:
        # With one thread for all devices, since send nodes must come last on all of them.
        with torch.autograd.set_multithreading_enabled(False):
            ones = [torch.ones(()) for _ in outputs]
            found = _grad(edges, ones, behind, retain_graph, create_graph)
    finally:
        traffic.reset(token)
    return list(leaves.values()), found


def _leave_nothing() -> None:
    """Drop the nodes of a failed run that torch did not get to.

    Each thread has a queue of nodes to run. After an error torch leaves them in it, with all that
    hangs on them, until the thread runs a graph again. So we run one, whose node comes last.
    """
    with torch.enable_grad():
        start = torch.ones((), requires_grad=True)
        last = start * 1
    internals.set_sequence_nr(last.grad_fn)(0)
    torch.autograd.grad([last], [start])


def of_leaves(
    inputs: Sequence[GradientEdge], found: Sequence[Tensor | None], taken: set[int] | None
) -> list[tuple[Tensor, Tensor]]:
    """Return the leaves among the inputs, and the gradients that a run has found for them.

    Each gradient is for the leaf to keep: with its layout, in memory that is its alone, as torch's
    accumulation into `.grad` does. Users and optimizers change gradients in place.

    Args:
        found: no other object refers to it.
        taken: addresses of memory that other leaves have; those of these are added; None: the
            gradients are taken as they are.
    """
    kept = []
    for index, input_ in enumerate(inputs):
        node = input_.node
        if type(node) is not _LEAF:
            continue
        # One reference is the sequence's, one the argument's. More: it is a backward function's.
        is_held_elsewhere = sys.getrefcount(found[index]) > 2
        gradient = found[index]
        if gradient is None:
            continue
        leaf = node.variable  # type: ignore[attr-defined]
        if taken is not None:
            if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
                gradient = gradient.clone() if is_held_elsewhere else gradient
            else:
                address = gradient.data_ptr()
                if is_held_elsewhere or address in taken or gradient.stride() != leaf.stride():
                    gradient = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
                    address = gradient.data_ptr()
                taken.add(address)
        kept.append((leaf, gradient))
    return kept
