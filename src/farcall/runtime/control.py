"""Messages that belong to no call: of the reference protocol, of shutdown, and CANCEL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from farcall.errors import LinkError, RpcTimeout
from farcall.runtime.calls.outboxes import AT_ONCE, Box, Outboxes, end_of_grace
from farcall.runtime.context import waiting
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.peers import Peer
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.status import Status
from farcall.transport.base import Endpoint, Link, NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Buffer, Message

SEND_SECONDS = 10.0  # after which a sender that waits looks whether the peer is still wanted
RETRY_SECONDS = 0.1

FindLink = Callable[[float], Link | None]  # until a deadline, `time.monotonic()` seconds


def _is_sent(link: Link, frame: Frame, deadline: float) -> bool:
    """Send a frame, unless it could not be begun by the deadline."""
    try:
        link.send(frame, deadline)
    except NotSent:
        return False
    except (LinkError, TimeoutError):
        pass  # a loss ends the rest, too; else the rest follows when the peer reads
    return True


class _Later:
    """A message that waits in a box until the peer takes it or is lost."""

    size = 0

    def __init__(
        self, status: Status, outboxes: Outboxes, peer: Peer, frame: Frame, find_link: FindLink
    ) -> None:
        self._status = status
        self._outboxes = outboxes
        self._peer = peer
        self._frame = frame
        self._find_link = find_link

    @property
    def is_over(self) -> bool:
        return self._peer.loss_cause is not None or self._status.is_closed

    def send(self) -> None:
        while not self.is_over:
            until = time.monotonic() + SEND_SECONDS
            try:
                link = self._find_link(until)
            except TimeoutError:
                pass  # the peer is alive, or not known to be dead
            else:
                if link is None or _is_sent(link, self._frame, until):
                    return
            if time.monotonic() < until:  # it did not take the time that it had
                self._outboxes.pause(RETRY_SECONDS)

    def drop(self) -> None:
        pass


class ControlMessages:
    """Sends messages that no thread waits for, as long as the peer lives. Thread-safe.

    A sender does not wait for the peer: a message that can't be written at once waits in a box.

    Args:
        to_self: is given what this worker says to itself.
    """

    def __init__(
        self,
        status: Status,
        endpoint: Endpoint,
        directory: Directory,
        links: Links,
        losses: Losses,
        outboxes: Outboxes,
        to_self: Callable[[Peer, Message, int], None],
    ) -> None:
        self._status = status
        self._me = status.me
        self._endpoint = endpoint
        self._directory = directory
        self._links = links
        self._losses = losses
        self._outboxes = outboxes
        self._to_self = to_self

    def post(self, to: int, message: Message, call_id: int) -> None:
        """Send a message to an incarnation, by whichever link there is. Never raises, nor waits."""
        peer = self._directory.of_incarnation(to)
        if peer is None or peer.loss_cause is not None:
            return
        if peer.worker is self._me:
            self._to_self(peer, message, call_id)
            return
        box = peer.outbox if peer.back_link is None else peer.back_outbox
        self._send(box, peer, Frame(message, call_id), partial(self._any_link, peer))

    def _any_link(self, peer: Peer, deadline: float) -> Link | None:
        return peer.back_link or self._dialled_link(peer, deadline)

    def _dialled_link(self, peer: Peer, deadline: float) -> Link | None:
        link = self._links.linked(peer)
        if link is not None or deadline <= AT_ONCE:
            return link
        try:
            return self._links.connect(peer, deadline)
        except LinkError as error:
            self._losses.unreachable(peer, error, deadline)
            return None

    def report(self, peer: Peer, message: Message) -> None:
        """Post a message by the link that `send` takes."""
        if peer.loss_cause is None:
            is_dialled = self._dials(peer)
            box = peer.outbox if is_dialled else peer.back_outbox
            find = self._dialled_link if is_dialled else self._any_link
            self._send(box, peer, Frame(message), partial(find, peer))

    def _dials(self, peer: Peer) -> bool:
        """Return which of two links between two workers both use for what belongs to no call."""
        return peer.back_link is None or (peer.linked and self._me.id < peer.worker.id)

    def send(self, peer: Peer, frame: Frame, deadline: float) -> Link:
        """Send a frame that belongs to no call, once. Gives the link that it went by.

        Two workers use the same link for what they send to each other in this way. A thread of the
        agent that waits here for the peer leaves its place to another one.

        Args:
            deadline: `time.monotonic()` seconds: the agent's `rpc_timeout` from the first attempt.

        Raises:
            CallError: the peer is gone, or takes nothing by the deadline.
        """
        if peer.loss_cause is not None:
            raise peer.loss()
        link = self._links.linked(peer) if self._dials(peer) else peer.back_link
        try:
            if link is None:
                with waiting():
                    link = self._links.connect(peer, deadline)
            try:
                link.send(frame, end_of_grace(frame, deadline))
            except NotSent:
                with waiting():
                    link.send(frame, deadline)
        except LinkError as error:
            self._losses.unreachable(peer, error, deadline)
            raise self._status.ended(peer) from error
        except NotSent as error:
            what = type(frame.message).__name__
            raise RpcTimeout(
                f"{ran_too_long(self._status.rpc_timeout)}: worker {peer.name!r} took no message "
                f"({what}); pass rpc_timeout= in the options of init_rpc for more"
            ) from error
        except TimeoutError:
            pass  # the rest of the frame follows when the peer reads again
        assert link is not None
        return link

    def follow(self, to: int, message: Message, call_id: int) -> None:
        """Post a message by the link of requests, so that it follows the request of the call.

        Without that link the peer is lost soon, and that ends the call, too. Of a call whose
        request was not sent the callee need not hear, see CALL-4.
        """
        peer = self._directory.of_incarnation(to)
        if peer is not None and peer.loss_cause is None:
            frame = Frame(message, call_id)
            self._send(peer.outbox, peer, frame, lambda _: self._links.linked(peer))

    def answer(self, to: int, message: Message, call_id: int, body: Buffer = b"") -> None:
        """Post a small answer to a call, by the link that requests come by."""
        peer = self._directory.of_incarnation(to)
        if peer is None or peer.loss_cause is not None:
            return
        frame = Frame(message, call_id, body)
        box, link = peer.back_outbox, peer.back_link
        if link is None or not (box.is_idle and _is_sent(link, frame, AT_ONCE)):
            self._leave(box, peer, frame, partial(self._any_link, peer))

    def _send(self, box: Box, peer: Peer, frame: Frame, find_link: FindLink) -> None:
        link = find_link(AT_ONCE) if box.is_idle else None
        if link is None or not _is_sent(link, frame, AT_ONCE):
            self._leave(box, peer, frame, find_link)

    def _leave(self, box: Box, peer: Peer, frame: Frame, find_link: FindLink) -> None:
        later = _Later(self._status, self._outboxes, peer, frame, find_link)
        self._outboxes.put(box, later, math.inf)

    def watch(self, incarnation: int, deadline: float = math.inf) -> None:
        """Have a link to a worker, so that its death is noticed. Waits while it does not answer.

        Args:
            deadline: `time.monotonic()` seconds, when to give up.
        """
        peer = self._directory.of_incarnation(incarnation)
        while not (peer is None or peer.loss_cause or peer.worker is self._me):
            if self._status.is_closed:
                return
            try:
                self._links.connect(peer, min(deadline, time.monotonic() + SEND_SECONDS))
            except LinkError as error:
                self._losses.unreachable(peer, error, deadline)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
            return

    def awaited(self) -> set[int]:
        """Return the incarnations to which calls of ours are in flight."""
        return {peer.incarnation for peer in self._directory.live() if len(peer.outgoing)}

    def answers(self, incarnation: int, until: float) -> bool:
        """Return whether a worker's process says that it is there. A lost one need not be asked.

        Args:
            until: `time.monotonic()` seconds, how long to wait for that.
        """
        peer = self._directory.of_incarnation(incarnation)
        if peer is None or peer.loss_cause is not None:
            return True
        return self._endpoint.answers(peer.worker, until)

    def give_up(self, incarnation: int, cause: str) -> None:
        """Declare a worker lost."""
        peer = self._directory.of_incarnation(incarnation)
        if peer is not None:
            self._losses.declare_lost(peer, cause)
