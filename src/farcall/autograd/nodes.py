"""Records of the messages of an autograd context at a worker: where gradients enter and leave.

Each tensor that is sent becomes the input of a node of its own, where its gradient enters the local
graph: a *send node*. Each tensor that arrives becomes the output of a node of its own, where the
local graph ends: a *recv node*. The names are torch's. Most passes only use the places of these
nodes. When a pass runs them, they do what the `Traffic` of the running thread says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farcall import torch_internals as internals
from farcall.protocol.passes import ROOT
from farcall.runtime.membership.peers import Peer

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")

# Send nodes have lower numbers than all other nodes, see `graph.GraphExploration.make_first`.
SEND_NODES_BELOW = 1 << 40


class Traffic(Protocol):
    """The actions of send and recv nodes in a thread that runs them."""

    def enter(self, source: int, index: int) -> Tensor | None:
        """Return the gradient of a tensor that was sent: it is waited for."""

    def leave(self, node: Node, gradient: Tensor | None) -> bool:
        """Take the complete gradient of a tensor that arrived; return False if not of this pass."""


traffic: ContextVar[Traffic | None] = ContextVar("farcall_traffic", default=None)

# `torch.autograd.Function` without its support for torch.func, which takes as long as all the rest.
_Function = internals.SingleLevelFunction

# A recv node is run only if something behind it is asked for. Only a thread that has the GIL may
# use this leaf, as `apply` does; making the edge does not. For torch looks for the accumulator of
# the leaf under a mutex of the leaf, and may have to wait for the GIL then, while the thread that
# has the GIL waits for the mutex, both forever (torch 2.13).
BEHIND_RECV_NODES = torch.empty(0, requires_grad=True)
BEHIND_EDGE = get_gradient_edge(BEHIND_RECV_NODES)


def with_grad(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call it inside `torch.enable_grad()`, at no cost where grad is enabled."""
    if torch.is_grad_enabled():
        return function(*args, **kwargs)
    with torch.enable_grad():
        return function(*args, **kwargs)


class _SendFunction(_Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, index: int) -> Tensor:
        ctx.place = source, index
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        current = traffic.get()
        assert current is not None
        return current.enter(*ctx.place), None, None


class _RecvFunction(_Function):
    @staticmethod
    def forward(ctx: Any, behind: Tensor, arrived: Tensor, origin: tuple[str, int]) -> Tensor:
        ctx.origin = origin
        # The work of set_materialize_grads and mark_dirty, which are functions of Python.
        ctx.materialize_grads = False
        ctx.dirty_tensors = (arrived,)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        current = traffic.get()
        if current is None or not current.leave(ctx, gradient):
            raise RuntimeError(_explain(*ctx.origin))
        return None, None, None


class _Copy(_Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Tensor) -> Tensor:
        ctx.materialize_grads = False
        ctx.dirty_tensors = (copy,)
        return copy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


class Kept:
    """Tensors of which copies are sent later: the gradients of the copies are theirs."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = iter(tensors)

    def attach(self, copy: Tensor) -> Tensor:
        """Make a copy without a graph that of the next tensor; gives it back."""
        tensor = next(self._tensors)
        if tensor.is_leaf or type(tensor) is not Tensor:
            tensor = with_grad(_behind, tensor)
        with_grad(_Copy.apply, tensor, copy)
        return copy


class SentTensors:
    """Tensors whose gradients enter the graph here: the roots, or those sent in one message.

    Attributes:
        number: that of the message, or ROOT.
        edges: where in the graph each of them was, when this was made.
    """

    __slots__ = ("_outputs", "_roots", "edges", "number")

    def __init__(self, number: int, tensors: Sequence[Tensor]) -> None:
        self.number = number
        self._roots = tensors
        self._outputs: list[Tensor] = []
        if number == ROOT:
            self.edges = [
                get_gradient_edge(tensor)
                if tensor.grad_fn is None
                else GradientEdge(tensor.grad_fn, tensor.output_nr)
                for tensor in tensors
            ]
        else:
            # Sent tensors may be changed in place before the pass.
            self._outputs, self._roots = with_grad(_make_send_nodes, number, tensors), ()
            behind = [output.grad_fn.next_functions[0] for output in self._outputs]  # type: ignore[union-attr]
            self.edges = [GradientEdge(node, index) for node, index in behind]  # type: ignore[arg-type]

    def outputs(self) -> list[Tensor]:
        """Return, for each of them, the output of its send node."""
        if not self._outputs:
            self._outputs = with_grad(_make_send_nodes, self.number, self._roots)
        return self._outputs


def _make_send_nodes(source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    made: list[Tensor] = [
        _SendFunction.apply(  # type: ignore[no-untyped-call]
            _behind(tensor) if tensor.is_leaf or type(tensor) is not Tensor else tensor,
            source,
            index,
        )
        for index, tensor in enumerate(tensors)
    ]
    for output in made:
        internals.set_sequence_nr(output.grad_fn)(source % SEND_NODES_BELOW)
    return made


def _behind(leaf: Tensor) -> Tensor:
    """Return a tensor with the gradient, dense or sparse, of the leaf, which may be of a subclass.

    `apply` is not for leaves: it has the GIL, see BEHIND_RECV_NODES.
    """
    if type(leaf) is not Tensor and type(leaf) is not torch.nn.Parameter:
        return plain(leaf)
    return leaf.expand_as(leaf) if leaf.layout is torch.strided else leaf.clone()


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its subclass, whose own functions are not called."""
    with internals.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


class ReceivedTensors(msgspec.Struct, eq=False):
    """Tensors that this worker received in one message."""

    peer: Peer  # their sender
    number: int  # the sender's number for them
    context: int  # id of the context they belong to
    receives: dict[Node, ReceivedTensors]  # of that context; recv nodes are added
    nodes: list[Node] = []  # their recv nodes, in the order of the message

    def attach(self, arrived: Tensor) -> Tensor:
        """Make a tensor without a graph the output of a recv node; gives it back."""
        origin = self.peer.name, self.context
        if torch.is_grad_enabled():
            _RecvFunction.apply(BEHIND_RECV_NODES, arrived, origin)  # type: ignore[no-untyped-call]
        else:
            with torch.enable_grad():
                _RecvFunction.apply(BEHIND_RECV_NODES, arrived, origin)  # type: ignore[no-untyped-call]
        node = arrived.grad_fn
        assert node is not None
        self.nodes.append(node)
        self.receives[node] = self
        return arrived


def _explain(worker: str, context: int) -> str:
    return (
        f"a tensor that came from worker {worker!r} belongs to autograd context {context}: "
        f"gradients flow through it only by farcall.autograd.backward({context}, [loss]), while "
        "that context is open, and a second time only if retain_graph=True was given the first time"
    )
