"""Distributed autograd: gradients through remote calls, as in `torch.distributed.autograd`.

    from farcall import autograd as dist_autograd

    with dist_autograd.context() as context_id:
        predicted = rpc.rpc_sync("worker1", predict, args=(inputs,))
        loss = loss_function(predicted, targets)
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

Calls made inside a context carry it to the workers they reach, and record the tensors requiring
grad that travel. `backward` then computes the gradient of the loss for every leaf on every worker.
Gradients go to the context on the worker where the leaf lives, not to `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from farcall.autograd.autograd import Autograd
from farcall.autograd.context_state import Context
from farcall.runtime.calls.graph_breaks import breaks_graphs, methods_break_graphs
from farcall.runtime.context import CallContext, current_context, reset_context, set_context
from farcall.runtime.current import current_agent
from farcall.serde import hide_own_frames

__all__ = ["backward", "context", "get_gradients"]


def __dir__() -> list[str]:
    return __all__


def _autograd() -> Autograd:
    agent = current_agent()
    if agent.executor.collecting.thread:
        agent.executor.collecting.refuse("farcall.autograd")
    return agent.gradients  # type: ignore[return-value]


def context_with_id(context_id: int) -> Context:
    """Return this worker's part of a context. For farcall's own optimizers.

    Raises:
        RuntimeError: this worker has no such context.
    """
    return _autograd().find(context_id)


@methods_break_graphs
class context:  # noqa: N801 - named as in PyTorch
    """Open a context for forward and backward passes that span workers. Yields its id.

    When the block ends, all workers forget the context and its records. Other threads may use the
    id while the block is open; their calls are recorded only if they are made in a block of their
    own or by a function that was called inside this one.

    Raises:
        RuntimeError: this thread is in a context already.
        NotInitialized: before `init_rpc` or after `shutdown`.
    """

    __slots__ = ("_autograd", "_id", "_token")

    def __repr__(self) -> str:
        number: int | None = getattr(self, "_id", None)
        return f"<farcall.autograd.context {'not entered' if number is None else number}>"

    def __enter__(self) -> int:
        self._autograd = _autograd()
        outer = current_context() or CallContext(self._autograd.agent)
        if outer.gradients:
            raise RuntimeError(
                "Already have an autograd context id for this thread: "
                f"{outer.gradients}. Contexts can't be nested"
            )
        self._id = self._autograd.open()
        self._token = set_context(replace(outer, gradients=self._id))
        return self._id

    def __exit__(self, *_: object) -> None:
        try:
            reset_context(self._token)
        finally:
            self._autograd.end(self._id)


@breaks_graphs
def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
    mode: str = "smart",
) -> None:
    """Compute the gradients of the sum of the roots for all leaves, on all workers.

    The gradients are added to those that the context has; `get_gradients` returns them. `backward`
    returns when all workers are done. The agent's `rpc_timeout` (seconds) bounds each message of
    the pass, and so the pass.

    Args:
        context_id: the open context in which the roots were computed.
        roots: tensors of one element that require grad.
        retain_graph: keep the graph for another backward pass.
        create_graph: make the gradients part of the graph, so that a later pass can go through
            them. Implies `retain_graph`.
        mode: in "smart", sent tensors that the roots don't depend on cost nothing. Where messages
            share parts of a worker's graph, a wave of small messages first finds out which are
            used. "fast" saves that wave, and may be used if the roots depend on every tensor
            requiring grad that was sent in the context.

    Raises:
        RuntimeError: no such context; no roots, or one that is no scalar or does not require grad;
            in fast mode, something was sent that the roots do not depend on.
        PeerLost: a worker of the pass died.
        RpcTimeout: a part of the pass took too long.
        BaseException: what a backward function or hook raised, on whichever worker.

    May be called from several threads at once. After an error the gradients in the context are
    incomplete.
    """
    try:
        _autograd().backward(
            context_id, roots, retain_graph=retain_graph, create_graph=create_graph, mode=mode
        )
    except BaseException as error:
        hide_own_frames(error)
        raise


@breaks_graphs
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that a context has on this worker: leaf -> gradient of the same shape.

    Inside a function that was called remotely, "this worker" is the worker that runs it.

    Raises:
        RuntimeError: this worker has no such context.
    """
    return context_with_id(context_id).gradients()
