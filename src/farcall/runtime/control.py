"""Messages that belong to no call: of the reference protocol, of shutdown, and CANCEL."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

from farcall.errors import LinkError, RpcTimeout
from farcall.runtime.peers import Peer
from farcall.transport.base import Link, NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Cancel, Message, Pinned

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

SEND_SECONDS = 10.0  # a message that can't be written for so long is sent again
RETRY_SECONDS = 2.0


class ControlMessages:
    """Sends what nobody waits for, and goes on trying while the peer lives. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._unsent: list[tuple[int, Message, int]] = []
        self.retry_at = math.inf  # `time.monotonic()` seconds

    def post(self, to: int, message: Message, call_id: int, deadline: float = math.inf) -> None:
        """Send a message to an incarnation, by whichever link there is. Never raises.

        Args:
            deadline: `time.monotonic()` seconds, for this attempt.
        """
        peer = self._agent.directory.of_incarnation(to)
        if peer is None or peer.lost is not None:
            return
        if peer.worker is self._agent.me:
            self._agent.on_control(peer, message, call_id)
            return
        self._agent.executor.may_pass_lead()
        deadline = min(deadline, time.monotonic() + SEND_SECONDS)
        try:
            self._send(peer, Frame(message, call_id), deadline)
        except LinkError as error:
            self._agent.lose(peer, str(error))
        except TimeoutError:
            self._keep(to, message, call_id)

    def send(self, peer: Peer, frame: Frame, deadline: float) -> Link:
        """Send a frame that belongs to no call, once. Gives the link that it went by.

        Two workers use the same link for what they send to each other in this way.

        Args:
            deadline: `time.monotonic()` seconds: the agent's `rpc_timeout` from the first attempt.

        Raises:
            CallError: the peer is gone, or takes nothing by the deadline.
        """
        if peer.lost is not None:
            raise peer.loss()
        link: Link | None = peer.back_link
        try:
            if link is None or (peer.linked and self._agent.me.id < peer.worker.id):
                link = self._agent.connect(peer, deadline)
            link.send(frame, deadline)
        except LinkError as error:
            self._agent.lose(peer, str(error))
            raise self._agent.outcomes.ended(peer) from error
        except NotSent as error:
            what = type(frame.message).__name__
            raise RpcTimeout(
                f"worker {peer.name!r} took no message ({what}) for {self._agent.rpc_timeout:g} s; "
                "pass rpc_timeout= in the options of init_rpc for more"
            ) from error
        except TimeoutError:
            pass  # the rest of the frame follows when the peer reads again
        assert link is not None
        return link

    def _send(self, peer: Peer, frame: Frame, deadline: float) -> None:
        link = peer.back_link
        if link is not None:
            with contextlib.suppress(LinkError):
                link.send(frame, deadline)
                return
        self._agent.connect(peer, deadline).send(frame, deadline)

    def cancel(self, peer: Peer, call_id: int) -> None:
        """Tell a callee that nobody waits for this call: at once if its link takes it, or later.

        Of a call whose request was not sent the callee need not hear, see CALL-4.
        """
        self._follow(peer, Cancel(), call_id)

    def ask_for_references(self, peer: Peer, call_id: int) -> None:
        """Have a callee say RECEIVED for a request of which we can't tell whether it was sent.

        After a `cancel`, the callee has seen the call in either case.
        """
        self._follow(peer, Pinned(of_reply=False), call_id)

    def _follow(self, peer: Peer, message: Message, call_id: int) -> None:
        """Send a message by the link that the request went by, so that it comes after that."""
        if peer.lost is not None:
            return
        try:
            self._agent.connect(peer, 0.0).send(Frame(message, call_id), 0.0)
        except TimeoutError:
            self._keep(peer.incarnation, message, call_id)
        except LinkError:
            pass  # its loss ends the call, too

    def answer(self, peer: Peer, link: Link, frame: Frame) -> None:
        """Send an answer that the caller does not wait for, but needs to forget the call."""
        try:
            link.send(frame, time.monotonic() + SEND_SECONDS)
        except NotSent:
            self._keep(peer.incarnation, frame.message, frame.call_id)
        except (LinkError, TimeoutError):
            pass  # the link's loss ends the call; else the rest follows when the caller reads

    def _keep(self, to: int, message: Message, call_id: int) -> None:
        # One that was cut in the middle is sent twice; every receiver takes that.
        with self._lock:
            self._unsent.append((to, message, call_id))
            self.retry_at = time.monotonic() + RETRY_SECONDS
        self._agent.endpoint.wake()

    def retry(self) -> None:
        """Send what could not be sent. A peer that still takes nothing is asked once, not for each.

        Else a worker that is stopped would hold up the messages to all others.
        """
        with self._lock:
            unsent, self._unsent = self._unsent, []
            self.retry_at = math.inf
        stuck: set[int] = set()
        for to, message, call_id in unsent:
            if to in stuck:
                self._keep(to, message, call_id)
                continue
            kept = len(self._unsent)
            peer = self._agent.directory.of_incarnation(to)
            if isinstance(message, Cancel | Pinned) and peer is not None:
                self._follow(peer, message, call_id)
            else:
                self.post(to, message, call_id)
            if len(self._unsent) > kept:
                stuck.add(to)

    def watch(self, incarnation: int, deadline: float = math.inf) -> None:
        """Have a link to a worker, so that its death is noticed. Waits while it does not answer.

        Args:
            deadline: `time.monotonic()` seconds, when to give up.
        """
        peer = self._agent.directory.of_incarnation(incarnation)
        while not (peer is None or peer.lost or peer.worker is self._agent.me):
            if self._agent.is_closed:
                return
            try:
                self._agent.connect(peer, min(deadline, time.monotonic() + SEND_SECONDS))
            except LinkError as error:
                self._agent.lose(peer, str(error))
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
            return
