"""The workers that are there, and news of them: `rpc.workers`, `wait_for`, `on_join`, `on_leave`.

The directory says in which order workers came and went (DIR-7 in `protocol/directory.py`). A
thread of its own tells listeners of that in the same order, without locks.

A worker of an open group is known here when it has dialled this one, was called, or the store was
asked. So while a caller waits or listens a thread looks, several times a second, whether workers
have joined, and makes links to those whose leaving is to be noticed. Nothing is done otherwise.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from farcall.errors import RpcTimeout, UnknownWorker
from farcall.ids import Member
from farcall.log import get_logger
from farcall.protocol.directory import News
from farcall.runtime.context import waiting
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.hosts import host_name
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.roll_call import RollCall
from farcall.runtime.status import Status
from farcall.runtime.threads.forked import call_ending_forks
from farcall.transport.brief_threads import BriefThreads

logger = get_logger("farcall")

LOOK_SECONDS = 0.1  # between two looks for newcomers
ROLL_CALL_SECONDS = 2.0  # that the store, and workers without a link, have to answer `workers`

Kind = Literal["joined", "left", "lost", "refused"]


class MemberEvent(NamedTuple):
    """A worker has come or gone.

    Attributes:
        kind: "joined"; "left": it has shut down; "lost": it died, or was cut off; "refused": one of
            the two workers does not want a link with the other.
        worker: the worker that has come or gone.
        why: for a worker that has gone, the reason in words, as far as it is known.
    """

    kind: Kind
    worker: Member
    why: str = ""


def member_of(peer: Peer) -> Member:
    """Return the description of a worker, for users."""
    worker = peer.worker
    return Member(worker.name, worker.id, worker.role, host_name(worker.host), worker.pid)


def _event_of(news: News[Peer]) -> MemberEvent:
    peer, member = news.party, member_of(news.party)
    if news.is_here:
        return MemberEvent("joined", member)
    if peer.left is not None:
        return MemberEvent("left", member, peer.left)
    kind: Kind = "refused" if peer.refused else "lost"
    return MemberEvent(kind, member, peer.loss_cause or "another worker has its name now")


class Listener:
    """A receiver of events, until it is closed.

    Args:
        hear: called with each event.
        joins: whether it wants to hear of newcomers.
        leaves: whether it wants to hear of those that have gone.
        end: called once nothing more will be told.
    """

    def __init__(
        self,
        hear: Callable[[MemberEvent], object],
        *,
        joins: bool,
        leaves: bool,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.hear = hear
        self.end = end
        self.joins = joins
        self.leaves = leaves
        self.is_open = True

    def wants(self, news: News[Peer]) -> bool:
        """Return whether it is told of some news."""
        return self.is_open and (self.joins if news.is_here else self.leaves)

    def silence(self) -> None:
        """Be told of nothing more. Never waits."""
        self.is_open = False


class Roster:
    """The workers in an agent's group. Thread-safe.

    Args:
        status: of the agent.
        directory: tells the news.
        roll_call: finds out which workers are there.
        enter: called in each thread that runs functions of users, before them.
    """

    def __init__(
        self, status: Status, directory: Directory, roll_call: RollCall, enter: Callable[[], None]
    ) -> None:
        self._status = status
        self._me = status.me
        self._directory = directory
        self._roll_call = roll_call
        self._enter = enter
        self._changed = threading.Condition()  # guards what follows
        self._here: list[Peer] = []
        self._listeners: list[Listener] = []
        self._awaited = 0  # calls of `wait_for` that go on
        self._untold: deque[tuple[News[Peer], list[Listener]]] = deque()
        self._is_telling = False
        self._is_looking = False
        self._doubt = ""  # why the store could not be asked
        self._tellers = BriefThreads(f"farcall-members-{self._me.name}", 1)
        self._lookers = BriefThreads(f"farcall-look-{self._me.name}", 1)
        directory.on_news = self._take
        self._take()

    # The news of the directory.

    def _take(self) -> None:
        """Have the news told. Never waits."""
        with self._changed:
            news, self._here = self._directory.take()
            for one in news:
                self._enqueue(one, self._listeners)
            self._changed.notify_all()
            begins = bool(self._untold) and not self._is_telling
            self._is_telling = self._is_telling or begins
        if begins and not self._tellers.run(self._tell, needed=False):
            self._is_telling = False  # the system has no thread; the next event tries again

    def _enqueue(self, news: News[Peer], listeners: Iterable[Listener]) -> None:
        told = [listener for listener in listeners if listener.wants(news)]
        if told and news.party.name != self._me.name:
            self._untold.append((news, told))

    def _tell(self) -> None:
        self._enter()
        while True:
            with self._changed:
                if not self._untold or self._status.is_closed:
                    self._untold.clear()
                    self._is_telling = False
                    return
                news, listeners = self._untold.popleft()
            if not news.is_here:
                # A link that came up while the other left ended without a goodbye.
                self._roll_call.note_goodbye(news.party)
            event = _event_of(news)
            for listener in listeners:
                try:
                    if listener.is_open:
                        call_ending_forks(listener.hear, event)
                except BaseException:
                    logger.exception(
                        "%s: %r raised when it was told of %s", self._me.name, listener.hear, event
                    )

    # Listeners.

    def listen(self, listener: Listener, *, present: bool) -> None:
        """Tell a listener of all that comes from now on.

        Args:
            present: tell it first of those that are here already, as of newcomers.
        """
        self._refresh(time.monotonic() + ROLL_CALL_SECONDS)
        with self._changed:
            if self._status.is_closed:
                raise self._status.closed_error()
            news, self._here = self._directory.take()
            for one in news:
                self._enqueue(one, self._listeners)
            self._listeners = [*self._listeners, listener]
            for peer in self._here if present else ():
                self._enqueue(News(peer, is_here=True), [listener])
        self._take()
        self._look()

    def dismiss(self, listener: Listener) -> None:
        """Tell a listener of nothing more. A call that has begun goes on."""
        listener.silence()
        with self._changed:
            self._listeners = [one for one in self._listeners if one is not listener]
            self._changed.notify_all()
        listener.end()

    # Questions.

    def workers(self, role: str | None) -> list[Member]:
        """Return the workers that are here. Waits two seconds at most for the store and them."""
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        self._refresh(deadline)
        return [member_of(peer) for peer in self._of(role)]

    def _refresh(self, deadline: float) -> None:
        self._roll_call.ask_store(deadline)
        with self._changed:
            here = list(self._here)
        self._roll_call.weed(here, deadline)

    def _of(self, role: str | None) -> list[Peer]:
        with self._changed:
            here = [p for p in self._here if p.loss_cause is None and role in (None, p.worker.role)]
        return sorted(here, key=lambda peer: (peer.worker.id, peer.worker.name))

    def wait_for(
        self, names: tuple[str, ...], role: str | None, count: int, seconds: float
    ) -> list[Member]:
        """Return workers as soon as they are here.

        Args:
            names: who; empty: so many of a role.
            role: what for; None: any.
            count: how many.
            seconds: how long to wait; 0 for no limit.

        Raises:
            RpcTimeout: they are not; the message names the missing.
            UnknownWorker, PeerLost: they never will be, in a group of fixed size.
            Cancelled: the agent was shut down.
        """
        began = time.monotonic()
        deadline = began + (seconds or threading.TIMEOUT_MAX)
        seen: set[int] = set()  # incarnations that are known to be alive
        with self._waiting_for():
            while True:
                found, missing = self._find(names, role, count)
                fresh = [peer for peer in found if peer.incarnation not in seen]
                if not missing and fresh:
                    self._roll_call.weed(fresh, deadline)
                    seen.update(peer.incarnation for peer in fresh)
                elif not missing:
                    return [member_of(peer) for peer in found]
                elif not self._roll_call.is_open:
                    self._refuse(names, missing)
                elif not self._wait(found, names, role, count, deadline):
                    raise self._late(missing, seconds)

    @contextmanager
    def _waiting_for(self) -> Iterator[None]:
        with self._changed:
            self._awaited += 1
        try:
            self._look()
            yield
        finally:
            with self._changed:
                self._awaited -= 1
                self._changed.notify_all()

    def _find(
        self, names: tuple[str, ...], role: str | None, count: int
    ) -> tuple[list[Peer], list[str]]:
        """Return those that are here, and in words those that are missing."""
        here = self._of(role)
        if not names:
            lacking = count - len(here)
            of_role = "" if role is None else f" of role {role!r}"
            return here, [f"{lacking} of {count} workers{of_role}"] if lacking > 0 else []
        by_name = {peer.name: peer for peer in here}
        found = [by_name[name] for name in names if name in by_name]
        of_role = "" if role is None else f" (with role {role!r})"
        return found, [repr(name) + of_role for name in names if name not in by_name]

    def _wait(
        self, found: list[Peer], names: tuple[str, ...], role: str | None, count: int, until: float
    ) -> bool:
        """Wait until others are here than those; return False if the deadline comes first."""

        def is_news() -> bool:
            return self._status.is_closed or self._find(names, role, count)[0] != found

        with waiting(), self._changed:
            # In pieces, since a wait may be no longer than the system's clock can count.
            in_time = self._changed.wait_for(is_news, max(0.0, until - time.monotonic()))
        if self._status.is_closed:
            raise self._status.closed_error()
        return in_time

    def _refuse(self, names: tuple[str, ...], missing: list[str]) -> None:
        """Raise an error, in a group of fixed size, if names are wrong."""
        for name in names:
            self._directory.resolve(name)
        raise UnknownWorker(
            f"{self._me.name!r} waits in vain for {', '.join(missing)}: the group has a fixed "
            f"size, and there are {self._known()}"
        )

    def _late(self, missing: list[str], seconds: float) -> RpcTimeout:
        doubt = f"; the store could not be asked: {self._doubt}" if self._doubt else ""
        return RpcTimeout(
            f"{self._me.name!r} has waited {seconds:g} s for {', '.join(missing)}{doubt}; there "
            f"are {self._known()}"
        )

    def _known(self) -> str:
        return ", ".join(
            repr(peer.name) + (f" ({peer.worker.role})" if peer.worker.role else "")
            for peer in self._of(None)
        )

    # Looking.

    def _look(self) -> None:
        """Have a thread look for newcomers, while a caller wants to know."""
        with self._changed:
            if self._is_looking or self._status.is_closed:
                return
            self._is_looking = True
        if not self._lookers.run(self._look_on, needed=False):
            self._is_looking = False

    def _look_on(self) -> None:
        while True:
            doubt = self._roll_call.ask_store(time.monotonic() + ROLL_CALL_SECONDS)
            with self._changed:
                self._doubt = doubt
                here = list(self._here)
                wants_leaves = any(listener.leaves for listener in self._listeners)
            is_watched = not wants_leaves or self._roll_call.watch(here)
            with self._changed:
                self._listeners = [one for one in self._listeners if one.is_open]
                if not self._is_wanted():
                    self._is_looking = False
                    return
                rests = is_watched and not self._roll_call.is_open
                self._changed.wait(None if rests else LOOK_SECONDS)

    def _is_wanted(self) -> bool:
        return not self._status.is_closed and bool(self._listeners or self._awaited)

    def close(self) -> None:
        """Tell listeners nothing more: the agent has shut down."""
        with self._changed:
            listeners, self._listeners = self._listeners, []
            self._changed.notify_all()
        for listener in listeners:
            listener.silence()
            listener.end()
        self._roll_call.close()
        self._tellers.close(0)
        self._lookers.close(0)
