"""The part of distributed autograd, which lies in a layer above, that an agent uses.

Tensors requiring grad that travel inside an autograd context are recorded on both sides. The agent
knows when they travel; a `DistributedGradients` decides about the records and their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farcall.runtime.membership.peers import Peer
from farcall.serde import Attach
from farcall.wire.frames import Frame
from farcall.wire.messages import CreditReturned, PassFailed


class DistributedGradients(Protocol):
    """Distributed autograd of one agent. Thread-safe.

    Context ids are positive; 0 stands for no context.
    """

    def send(
        self, context: int, peer: Peer, tensors: Sequence[torch.Tensor], waits: bool = False
    ) -> tuple[int, int]:
        """Note that a message goes to a peer inside a context.

        Args:
            tensors: those in the message that require grad, in order.
            waits: a thread that may change them in place waits until `record`.

        Returns:
            The fields of the message about it, `context` and `sent`; zeros if the context has
            ended. If `sent` is not 0, `record` must follow.
        """

    def keep(self, tensors: Sequence[torch.Tensor]) -> Attach:
        """Keep the history of a message that goes to a peer inside a context later.

        Args:
            tensors: those in it that require grad, in order.

        Returns:
            A function that gives their copies, in the same order, the history that they have now.
        """

    def record(self, context: int, sent: int) -> None:
        """Note that the message of `send` is on its way, or was not sent. May be said again."""

    def enter(self, context: int, peer: Peer) -> int:
        """Return the id of the context in which a peer's request arrived, or 0 if it has ended."""

    def receive(self, context: int, peer: Peer, sent: int) -> Attach | None:
        """Take a message with recorded tensors.

        Returns:
            A function that links each of them to its origin; None if the context has ended here.
        """

    def backward(
        self,
        context: int,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: str = "smart",
    ) -> None:
        """See `farcall.autograd.backward`."""

    def arrived(self, peer: Peer, frame: Frame) -> None:
        """Take a message with gradients."""

    def reported(self, peer: Peer, message: CreditReturned | PassFailed) -> None:
        """Take a peer's report on a backward pass of ours."""

    def released(self, context: int, low_watermark: int) -> None:
        """End a context, and all of its creator with ids below `low_watermark`."""

    def held(self, context: int, peer: Peer) -> None:
        """Note that a peer has a context of ours, as it reports."""

    def on_peer_lost(self, peer: Peer) -> None:
        """Fail the passes that a lost incarnation has a part in, and drop its contexts."""

    def close(self) -> None:
        """Keep nothing: the agent shuts down."""
