"""The routes of messages that are neither requests nor answers to the parts of an agent."""

from __future__ import annotations

import time

from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.membership.members import Members
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References
from farcall.wire.messages import (
    CreditReturned,
    Crowded,
    Dismiss,
    Drain,
    Drained,
    HoldContext,
    Leaving,
    Message,
    PassFailed,
    ReleaseContext,
    ThisIs,
    WhoIs,
)


class ControlRoutes:
    """The parts of an agent that get messages. For the leader's thread: none of them may wait."""

    def __init__(
        self,
        gradients: DistributedGradients,
        members: Members,
        coordinator: ShutdownCoordinator,
        references: References,
    ) -> None:
        self._gradients = gradients
        self._members = members
        self._coordinator = coordinator
        self._references = references

    def deliver(self, peer: Peer, message: Message, call_id: int) -> None:
        """Give a message to the part that it is for. A peer may be this worker itself."""
        match message:
            case Leaving(reason=reason):
                peer.left = reason
            case ReleaseContext(context=context, low_watermark=low_watermark):
                self._gradients.released(context, low_watermark)
            case HoldContext(context=context):
                self._gradients.held(context, peer)
            case CreditReturned() | PassFailed():
                self._gradients.reported(peer, message)
            case Crowded(why=why):
                peer.crowded, peer.crowded_at = why, time.monotonic()
            case Drain() | Drained() | Dismiss():
                self._coordinator.on_message(peer.incarnation, message)
            case WhoIs():
                self._members.on_question(peer, message)
            case ThisIs():
                self._members.on_answer(peer, message)
            case _:
                self._references.on_message(peer.incarnation, message, call_id)
