"""What happens when a worker is lost, and when it turns out that it lives.

A loss ends everything between two workers. One of them may be alive all the same: it stood still,
or nothing got through for a while. Then each is a new incarnation to the other (`farcall.ids`),
and they begin anew as soon as there is a link again. Whoever hears of the other first says in the
handshake which meeting of the two this is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farcall.errors import PeerLost
from farcall.ids import meeting_of, next_incarnation
from farcall.log import get_logger
from farcall.protocol.directory import Verdict
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.searching import Search
from farcall.transport.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

logger = get_logger("farcall")

ATTEMPT_SECONDS = 5.0  # to reach somebody who was lost


class Reception:
    """Answers an endpoint that listens before its agent exists. Until then nobody is lost.

    Attributes:
        losses: of the agent, once there is one.
    """

    losses: Losses | None = None

    def admit(self, name: str, incarnation: int, meeting: int) -> str | None:
        """See `transport.base.Admit`."""
        return None if self.losses is None else self.losses.admit(name, incarnation, meeting)

    def meeting(self, incarnation: int) -> int:
        """See `transport.base.Meeting`."""
        return 0 if self.losses is None else self.losses.meeting(incarnation)


class Losses:
    """The losses of one agent. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._me = agent.me
        self._lock = threading.Lock()  # around changes of what follows
        self._hearers: tuple[Callable[[PeerLost], None], ...] = ()
        self._search = Search(agent.me.name, self._reach)

    @contextlib.contextmanager
    def hearing(self, tell: Callable[[PeerLost], None]) -> Iterator[None]:
        """Inside the block, `tell` is called, in any thread, when a worker is lost.

        A death is noticed sooner or later where there is a link, see `ControlMessages.watch`.
        """
        with self._lock:
            self._hearers += (tell,)
        try:
            yield
        finally:
            with self._lock:
                self._hearers = tuple(one for one in self._hearers if one is not tell)

    def lose(self, peer: Peer, cause: str) -> None:
        """An incarnation is gone for good: everything that waits for it ends now."""
        if peer.lost is None:
            # Else who waits for what Ctrl-C left undone would wait forever.
            uninterrupted(lambda: self._lose(peer, cause), f"farcall-loss-{self._me.name}")

    def _lose(self, peer: Peer, cause: str) -> None:
        agent = self._agent
        with peer.lock:
            if peer.lost is not None or peer.worker is self._me:
                return
            peer.note_loss(cause)
            peer.back_link = None
        with agent.machine.lock:
            pending, jobs = agent.machine.state.lost(peer.incarnation, peer.left or cause)
        agent.executor.may_pass_lead()
        loss = peer.loss()
        steps: list[Callable[[], object]] = [
            lambda: agent.endpoint.drop(peer.incarnation, cause),
            *[job.cancel for job in jobs],  # first: those that are held must not run
            lambda: agent.outboxes.lose(peer.outbox),
            lambda: agent.outboxes.lose(peer.back_outbox),
            lambda: agent.answers.lost(peer),
            lambda: agent.outcomes.fail(pending, loss),
            lambda: agent.gradients.lost(peer),
            agent.references.lost,
            lambda: agent.leaver.lost(peer.incarnation),
            lambda: self._log(peer, cause),
            lambda: self._forget_long_lost(peer),
            lambda: self._look_for(peer),
            *(partial(tell, loss) for tell in self._hearers),
        ]
        for step in steps:
            try:
                step()
            except Exception:  # the others wait, too
                logger.exception("%s: an internal error after a loss", self._me.name)

    def _forget_long_lost(self, peer: Peer) -> None:
        forgotten = self._agent.directory.note_lost(peer, time.monotonic())
        with self._agent.machine.lock:
            self._agent.machine.state.forget(forgotten)

    def _log(self, peer: Peer, cause: str) -> None:
        agent = self._agent
        expected = agent.is_closed or peer.left is not None or agent.leaver.is_leaving
        logger.log(
            logging.DEBUG if expected else logging.WARNING,
            "%s: lost worker %r: %s",
            self._me.name,
            peer.name,
            peer.left or cause,
        )

    # Whoever was lost may live.

    def _look_for(self, peer: Peer) -> None:
        if peer.left is None and not self._agent.is_closed:
            self._search.begin(peer, times_met=meeting_of(peer.incarnation))

    def _reach(self, peer: Peer) -> None:
        if not self._agent.is_closed and self._agent.directory.is_current(peer):
            again = next_incarnation(peer.incarnation)
            worker = msgspec.structs.replace(peer.worker, incarnation=again)
            self._agent.endpoint.connect(worker, time.monotonic() + ATTEMPT_SECONDS)

    def meeting(self, incarnation: int) -> int:
        """For the endpoint, see `transport.base.Meeting`."""
        return self._agent.directory.meeting(incarnation)

    def admit(self, name: str, incarnation: int, meeting: int) -> str | None:
        """For the endpoint, see `transport.base.Admit`."""
        if self._agent.is_closed:
            return "this worker is shutting down"
        directory = self._agent.directory
        verdict, peer = directory.verdict(incarnation, meeting), directory.newest(incarnation)
        if verdict is Verdict.LEFT:
            return f"this incarnation of {name!r} has left: {peer and peer.left}"
        if verdict is Verdict.GIVEN_UP:
            return f"this incarnation of {name!r} was declared lost"
        if verdict is Verdict.TOO_OFTEN:
            return f"{name!r} was lost too often"
        if verdict is Verdict.ANEW:
            if peer is not None:
                self.lose(peer, "it had given this worker up")
            if directory.meet_again(incarnation, meeting, time.monotonic()):
                logger.warning(
                    "%s: worker %r, which was lost, is here again; both begin anew",
                    self._me.name,
                    name,
                )
        return None

    def close(self) -> None:
        """The agent shuts down: nobody is looked for any more."""
        self._search.close()
