"""`torch.distributed.autograd` while farcall stands in for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from farcall.autograd import backward as farcall_backward
from farcall.autograd import context, get_gradients
from farcall.autograd.autograd import Autograd
from farcall.autograd.context_state import Context
from farcall.autograd.nodes import ReceivedTensors, SentTensors
from farcall.errors import FarcallError
from farcall.protocol.contexts import CREATOR_SHIFT
from farcall.runtime.context import CallContext, current_context, set_context
from farcall.runtime.current import current_agent

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Return whether there is distributed autograd: always."""
    return True


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """See `farcall.autograd.backward`. An error of a backward function is a RuntimeError."""
    agent = current_agent()
    try:
        farcall_backward(context_id, roots, retain_graph)
    except FarcallError:
        raise
    except Exception as error:
        if str(error).startswith("incompatible function arguments"):
            raise
        worker = getattr(error, "remote_worker", agent.me.name)
        node = agent.directory.resolve(worker).worker.id
        said = getattr(error, "remote_error", error)
        raise RuntimeError(f"Error on Node {node}: {said}") from error


def _init(rank: int) -> None:
    """Do nothing: the context comes with the agent."""


def _autograd() -> Autograd:
    found = current_agent().gradients
    assert isinstance(found, Autograd)
    return found


class GraphNode:
    """A node of the graph, as one sees it who walks through the graph of torch's own.

    There all tensors of a message have one node where it is sent, and one where it arrives.
    """

    def __init__(self, context: Context, node: Any) -> None:
        self._context = context
        self._node = node

    def name(self) -> str:
        """Return the name of the function."""
        return str(self._node.name())

    @property
    def next_functions(self) -> tuple[tuple[GraphNode, int], ...]:
        """The nodes that its gradients go to."""
        return self._next(self._node.next_functions)

    def _next(self, edges: Iterable[tuple[Any, int]]) -> tuple[tuple[GraphNode, int], ...]:
        receives = self._context.receives
        return tuple(
            (
                RecvNode(self._context, receives[node])
                if node in receives
                else GraphNode(self._context, node),
                index,
            )
            for node, index in edges
        )

    @property
    def variable(self) -> torch.Tensor:
        """The tensor, of a node that accumulates a leaf's gradients."""
        leaf: torch.Tensor = self._node.variable
        return leaf

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)


class SendNode(GraphNode):
    """Of the tensors that were sent in a message."""

    def __init__(self, context: Context, source: SentTensors) -> None:
        super().__init__(context, source)

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[GraphNode, int], ...]:
        return self._next(map(_without_ours, self._node.edges))


class RecvNode(GraphNode):
    """Of the tensors that arrived in a message."""

    def __init__(self, context: Context, receive: ReceivedTensors) -> None:
        super().__init__(context, receive)

    def name(self) -> str:
        return "torch::distributed::autograd::RecvRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[GraphNode, int], ...]:
        return ()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) or other in self._node.nodes

    def __hash__(self) -> int:
        return hash(self._node)


def _without_ours(edge: Any) -> tuple[Any, int]:
    """Return the place of a sent tensor in the graph, without what farcall puts between."""
    node, index = edge[:2]
    if node.name() in ("CloneBackward0", "ExpandBackward0"):
        node, index = node.next_functions[0]
    return node, index


class DistAutogradContext:
    """A worker's part of a context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._context.id}>"

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, SendNode]:
        """Return the place in the graph of each sent message with tensors, by number."""
        sources = self._context.sources()
        return {source.number: SendNode(self._context, source) for source in sources}

    def _recv_functions(self) -> dict[int, RecvNode]:
        """Return the place in the graph of each message with tensors that arrived, by number."""
        receives = list(self._context.receives.values())
        return {receive.number: RecvNode(self._context, receive) for receive in receives}

    def _known_worker_ids(self) -> set[int]:
        """Ids of the workers that this one gave the context to."""
        directory = current_agent().directory
        peers = map(directory.of_incarnation, _autograd().known_to(self._context.id))
        return {peer.worker.id for peer in peers if peer is not None}


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_autograd().find(context_id))


def _current_context() -> DistAutogradContext:
    found = current_context()
    if found is None or not found.gradients:
        raise RuntimeError("Current thread doesn't have a valid autograd context")
    return _retrieve_context(found.gradients)


def _is_valid_context(context_id: int) -> bool:
    return _autograd().get(context_id) is not None


def _new_context() -> DistAutogradContext:
    outer = current_context() or CallContext(current_agent())
    if outer.gradients:
        raise RuntimeError(
            f"Already have an autograd context id for this thread: {outer.gradients}"
        )
    context_id = _autograd().open()
    set_context(replace(outer, gradients=context_id))
    return _retrieve_context(context_id)


def _release_context(context_id: int) -> None:
    found = current_context()
    if found is not None and found.gradients == context_id:
        set_context(replace(found, gradients=0))
    _autograd().end(context_id)


def _get_max_id() -> int:
    """Return the greatest id that a context of this worker may have."""
    return (current_agent().me.id + 1 << CREATOR_SHIFT) - 1


def _get_debug_info() -> dict[str, str]:
    autograd = _autograd()
    return {
        "num_autograd_contexts": str(len(autograd)),
        "num_current_backward_passes": str(autograd.passes()),
    }
