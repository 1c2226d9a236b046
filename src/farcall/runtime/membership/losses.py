"""The consequences of the loss of a worker, and of the news that it lives.

A loss ends everything between two workers. One of them may be alive all the same: it stood still,
or nothing got through for a while. Then each is a new incarnation to the other (`farcall.ids`),
and they begin anew as soon as there is a link again. The first to hear of the other says in the
handshake which meeting of the two this is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from farcall.errors import AuthenticationFailed, LinkError, PeerLost
from farcall.ids import meeting_of, next_incarnation
from farcall.log import get_logger, records_later
from farcall.protocol.directory import Verdict
from farcall.runtime.context import waiting
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.peers import IncomingCall, Peer, PendingCall
from farcall.runtime.membership.searching import Search
from farcall.runtime.status import Status
from farcall.transport.base import Endpoint
from farcall.transport.connect.handshake_messages import Unfinished, Unwanted
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall")

ATTEMPT_SECONDS = 5.0  # to reach a worker that was lost
START_SECONDS = 10.0  # that a dialler waits for a worker that is starting
SHUTTING_DOWN = "this worker is shutting down"
EVENT_SECONDS = 2.0  # that the end of a link, which is an event, has to be handled
ASK_SECONDS = 1.0  # that the store has to say whose a name is, of which two workers say that


class Loss(NamedTuple):
    """The meaning of a worker's loss for the calls between it and this one.

    Attributes:
        peer: the lost worker.
        cause: why it counts as lost.
        error: what the calls to it end with.
        calls: our calls to it that end by that.
        served: its calls that are being served here.
    """

    peer: Peer
    cause: str
    error: PeerLost
    calls: Sequence[PendingCall]
    served: Sequence[IncomingCall]

    def cancel_served(self) -> None:
        """Stop what can be stopped of the calls that are being served."""
        for call in self.served:
            try:
                call.cancel()
            except Exception:  # it may run code of the user; the others wait, too
                logger.exception("an internal error while a call of a lost worker was stopped")


EndCalls = Callable[[Peer, str], tuple[Sequence[PendingCall], Sequence[IncomingCall]]]
Party = Callable[[Loss], object]


class Reception:
    """Answers an endpoint that listens before its agent exists: a dialler waits for that.

    Else a stranger could be let in before it is known who belongs to the group.
    """

    def __init__(self) -> None:
        self._losses: Losses | None = None
        self._opened = threading.Event()

    def open(self, losses: Losses | None) -> None:
        """Let the agent's losses answer; None: there will be no agent."""
        self._losses = losses
        self._opened.set()

    def admit(self, name: str, incarnation: int, meeting: int) -> str | None:
        """See `transport.base.Admit`."""
        if not self._opened.wait(START_SECONDS):
            raise Unfinished("this worker is still starting")
        if self._losses is None:
            return "this worker has not started"
        return self._losses.admit(name, incarnation, meeting)

    def meeting(self, incarnation: int) -> int:
        """See `transport.base.Meeting`."""
        return 0 if self._losses is None else self._losses.meeting(incarnation)


class Losses:
    """The losses of one agent. Thread-safe.

    No worker can be lost before `start`.

    Attributes:
        obituary: says in words how the process of a worker ended, if this process knows that, as
            the one that has started it does. It may wait a little for the news; those who wait for
            the lost worker wait for it, too.
    """

    obituary: Callable[[str], str | None]

    def __init__(self, status: Status, endpoint: Endpoint, directory: Directory) -> None:
        self._status = status
        self._me = status.me
        self._endpoint = endpoint
        self._directory = directory
        self._lock = threading.Lock()  # around changes of what follows
        self._subscribers: tuple[Callable[[PeerLost], None], ...] = ()
        self._search = Search(status.me.name, self._reach)
        self.obituary = lambda _: None

    def start(
        self, end_calls: EndCalls, parties: Sequence[Party], discard: Callable[[list[int]], None]
    ) -> None:
        """Set the work to be done when a worker is lost.

        Args:
            end_calls: takes the calls between a peer, which was lost for some cause, and this
                worker out of the tables.
            parties: hear of each loss, one after the other, in the thread that noticed it. They
                must not wait. An error of one keeps nothing from the others.
            discard: drops all records of incarnations that were lost long ago.
        """
        self._end_calls = end_calls
        self._parties = parties
        self._discard = discard

    @contextlib.contextmanager
    def subscribed(self, on_peer_lost: Callable[[PeerLost], None]) -> Iterator[None]:
        """Call `on_peer_lost`, in any thread, when a worker is lost while the block runs.

        A death is noticed sooner or later where there is a link, see `ControlMessages.watch`.
        """
        with self._lock:
            self._subscribers += (on_peer_lost,)
        try:
            yield
        finally:
            with self._lock:
                self._subscribers = tuple(
                    one for one in self._subscribers if one is not on_peer_lost
                )

    def unreachable(self, peer: Peer, error: LinkError, deadline: float = math.inf) -> None:
        """Declare an incarnation gone, since there is no link to it. Waits if there was one.

        The end of a link is an event. It has its turn after what came by the link before, such as
        answers and a goodbye, and declares the loss itself, if it has its turn in time.

        Args:
            deadline: of that wait, `time.monotonic()` seconds.
        """
        peer.refused = isinstance(error, AuthenticationFailed | Unwanted)
        if isinstance(error, Unwanted) and str(error).endswith(SHUTTING_DOWN):
            peer.left = "it has shut down"
        try:
            if peer.had_link:
                with waiting():
                    peer.loss_told.wait(min(EVENT_SECONDS, deadline - time.monotonic()))
        finally:
            self.declare_lost(peer, str(error))

    def declare_lost(self, peer: Peer, cause: str) -> None:
        """Declare an incarnation lost for good, and end everything that waits for it."""
        if peer.loss_cause is None:
            # Else threads that wait for what Ctrl-C left undone would wait forever.
            uninterrupted(lambda: self._declare_lost(peer, cause), f"farcall-loss-{self._me.name}")

    @records_later()
    def _declare_lost(self, peer: Peer, cause: str) -> None:
        if peer.left is None and not self._status.is_closed:
            words = self.obituary(peer.name)
            cause = f"{cause}; its process ended: {words}" if words else cause
        with peer.lock:
            if peer.loss_cause is not None or peer.worker is self._me:
                return
            peer.note_loss(cause)
            peer.back_link = None
        calls, served = self._end_calls(peer, cause)
        loss = Loss(peer, cause, peer.loss(), calls, served)
        own: list[Party] = [self._log, self._discard_long_lost, self._look_for]
        subscribers: list[Party] = [partial(self._tell, one) for one in self._subscribers]
        for party in [*self._parties, *own, *subscribers]:
            try:
                party(loss)
            except Exception:  # the others wait, too
                logger.exception("%s: an internal error after a loss", self._me.name)
        peer.loss_told.set()

    @staticmethod
    def _tell(on_peer_lost: Callable[[PeerLost], None], loss: Loss) -> None:
        on_peer_lost(loss.error)

    def _discard_long_lost(self, loss: Loss) -> None:
        self._discard(self._directory.on_peer_lost(loss.peer, time.monotonic()))

    def _log(self, loss: Loss) -> None:
        peer, cause = loss.peer, loss.cause
        expected = peer.left is not None or self._status.is_closed or self._status.is_leaving
        logger.log(
            logging.DEBUG if expected else logging.WARNING,
            "%s: lost worker %r: %s",
            self._me.name,
            peer.name,
            peer.left or cause,
        )

    # A worker that was lost may live.

    def _look_for(self, loss: Loss) -> None:
        if loss.peer.left is None and not self._status.is_closed:
            self._search.begin(loss.peer, times_met=meeting_of(loss.peer.incarnation))

    def _reach(self, peer: Peer) -> None:
        if not self._status.is_closed and self._directory.is_current(peer):
            again = next_incarnation(peer.incarnation)
            worker = msgspec.structs.replace(peer.worker, incarnation=again)
            self._endpoint.connect(worker, time.monotonic() + ATTEMPT_SECONDS)

    def meeting(self, incarnation: int) -> int:
        """Return the meeting, for the endpoint: see `transport.base.Meeting`."""
        return self._directory.meeting(incarnation)

    def admit(self, name: str, incarnation: int, meeting: int) -> str | None:
        """Return an objection, for the endpoint: see `transport.base.Admit`."""
        if self._status.is_closed:
            return SHUTTING_DOWN
        directory = self._directory
        stranger = self._who_is(name, incarnation)
        if stranger is not None:
            return stranger
        verdict, peer = directory.verdict(incarnation, meeting), directory.newest(incarnation)
        if verdict is Verdict.LEFT:
            return f"this incarnation of {name!r} has left: {peer and peer.left}"
        if verdict is Verdict.GIVEN_UP:
            return f"this incarnation of {name!r} was declared lost"
        if verdict is Verdict.TOO_OFTEN:
            return f"{name!r} was lost too often"
        if verdict is Verdict.ANEW:
            if peer is not None:
                self.declare_lost(peer, "it had given this worker up")
            if directory.meet_again(incarnation, meeting, time.monotonic()):
                logger.warning(
                    "%s: worker %r, which was lost, is here again; both begin anew",
                    self._me.name,
                    name,
                )
        return None

    def _who_is(self, name: str, incarnation: int) -> str | None:
        """Return why a worker of that name and incarnation is none of this group, or None."""
        directory = self._directory
        if incarnation == self._me.incarnation:
            return "it says that it is this worker itself"
        peer = directory.newest(incarnation)
        if peer is not None:
            return None if peer.name == name else f"this incarnation is {peer.name!r}, not {name!r}"
        if not directory.can_ask(name):
            return f"this incarnation of {name!r} was not at the rendezvous of this fixed group"
        if directory.known(name) is not None:  # what the newcomer says takes no name from another
            directory.find(name, time.monotonic() + ASK_SECONDS)
        return None

    def close(self) -> None:
        """Look for no lost worker any more: the agent shuts down."""
        self._search.close()
