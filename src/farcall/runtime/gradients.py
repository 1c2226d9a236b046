"""The part of distributed autograd, which lies in a layer above, that an agent uses.

Tensors requiring grad that travel inside an autograd context are recorded on both sides. The agent
knows when they travel; a `Gradients` decides about the records and their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farcall.runtime.membership.peers import Peer
from farcall.serde import Attach
from farcall.wire.frames import Frame
from farcall.wire.messages import CreditReturned, PassFailed


class Gradients(Protocol):
    """Distributed autograd of one agent. Thread-safe.

    Context ids are positive; 0 stands for no context.
    """

    def send(
        self, context: int, peer: Peer, tensors: Sequence[torch.Tensor], waits: bool = False
    ) -> tuple[int, int]:
        """A message goes to a peer inside a context.

        Args:
            tensors: those in the message that require grad, in order.
            waits: a thread that may change them in place waits until `record`.

        Returns:
            What the message says of it, `context` and `sent`; zeros if the context has ended. If
            `sent` is not 0, `record` must follow.
        """

    def keep(self, tensors: Sequence[torch.Tensor]) -> Attach:
        """A message is kept, and goes to a peer inside a context later.

        Args:
            tensors: those in it that require grad, in order.

        Returns:
            What gives each of their copies, in the same order, the history that they have now.
        """

    def record(self, context: int, sent: int) -> None:
        """The message of `send` is on its way, or could not be sent. May be said again."""

    def enter(self, context: int, peer: Peer) -> int:
        """A request of a peer arrived inside a context: its id, or 0 if it has ended."""

    def receive(self, context: int, peer: Peer, sent: int) -> Attach | None:
        """A message with recorded tensors arrived: what links each of them to its origin.

        None if the context has ended here.
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
        """A message with gradients arrived."""

    def reported(self, peer: Peer, message: CreditReturned | PassFailed) -> None:
        """A peer says how it fared in a backward pass of ours."""

    def released(self, context: int, low_watermark: int) -> None:
        """A context has ended, and all of its creator with ids below `low_watermark`."""

    def held(self, context: int, peer: Peer) -> None:
        """A peer reports that it has a context of ours."""

    def on_peer_lost(self, peer: Peer) -> None:
        """Fail the passes that a lost incarnation has a part in, and drop its contexts."""

    def close(self) -> None:
        """The agent shuts down: nothing is kept."""
