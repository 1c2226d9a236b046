"""What `torch.distributed.autograd` is while farcall stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farcall.autograd import backward as farcall_backward
from farcall.autograd import context, get_gradients
from farcall.autograd.contents import Context
from farcall.autograd.recorder import Autograd
from farcall.errors import FarcallError
from farcall.protocol.contexts import CREATOR_SHIFT
from farcall.runtime.context import CallContext, current, current_agent

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether there is distributed autograd: always."""
    return True


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """See `farcall.autograd.backward`. What a backward function raised is a RuntimeError."""
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
    """Nothing: it comes with the agent."""


def _autograd() -> Autograd:
    found = current_agent().gradients
    assert isinstance(found, Autograd)
    return found


class DistAutogradContext:
    """What a worker has of a context."""

    def __init__(self, contents: Context) -> None:
        self._contents = contents

    def _context_id(self) -> int:
        return self._contents.id

    def _send_functions(self) -> dict[int, Any]:
        """For each message with tensors that was sent, by number: its place in the graph."""
        return {source.number: source.entries()[0].grad_fn for source in self._contents.sources()}

    def _recv_functions(self) -> dict[int, Any]:
        """For each message with tensors that arrived, by number: its place in the graph."""
        return {receive.number: node for node, receive in reversed(self._contents.receives.items())}

    def _known_worker_ids(self) -> list[int]:
        """Ids of the workers that this one gave the context to."""
        directory = current_agent().directory
        peers = map(directory.of_incarnation, _autograd().known_to(self._contents.id))
        return [peer.worker.id for peer in peers if peer is not None]


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_autograd().find(context_id))


def _current_context() -> DistAutogradContext:
    found = current.get()
    if found is None or not found.gradients:
        raise RuntimeError("Current thread doesn't have a valid autograd context")
    return _retrieve_context(found.gradients)


def _is_valid_context(context_id: int) -> bool:
    return _autograd().get(context_id) is not None


def _new_context() -> DistAutogradContext:
    outer = current.get() or CallContext(current_agent())
    if outer.gradients:
        raise RuntimeError(
            f"Already have an autograd context id for this thread: {outer.gradients}"
        )
    context_id = _autograd().open()
    current.set(CallContext(outer.agent, outer.deadline, context_id))
    return _retrieve_context(context_id)


def _release_context(context_id: int) -> None:
    found = current.get()
    if found is not None and found.gradients == context_id:
        current.set(CallContext(found.agent, found.deadline))
    _autograd().end(context_id)


def _get_max_id() -> int:
    """The greatest id that a context of this worker may have."""
    return (current_agent().me.id + 1 << CREATOR_SHIFT) - 1


def _get_debug_info() -> dict[str, str]:
    autograd = _autograd()
    return {
        "num_autograd_contexts": str(len(autograd)),
        "num_current_backward_passes": str(autograd.passes()),
    }
