"""Workers of a group exchange values: `rpc.all_gather`, `gather`, `barrier`.

Each makes one call to the leader, which is answered when all have come, or will not: so the death
of the leader ends every call by itself, and the leader hears of the death of another. Which
gathering a call belongs to is said by its `Ident`: the members' incarnations are in it, so a worker
that was started again begins anew with all others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from farcall.errors import CallError, PeerLost, RpcTimeout
from farcall.ids import original
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.roll_call import RollCall
from farcall.runtime.status import Status
from farcall.transport.brief_threads import BriefThreads

MOST_KEPT = 256  # counts of gatherings before those of groups that are gone are dropped
MOST_ENDED = 256  # gatherings that failed, of which latecomers are told
LOOK_SECONDS = 0.5  # between two looks whether those that are missing live
KINDS = ("all_gather", "gather", "barrier")


class Ident(NamedTuple):
    """The identity of a gathering: equal at all that take part.

    Attributes:
        key: the user's word for it, and what it is for.
        members: (name, original incarnation) of each, by name.
        leader: the name of the one that collects.
        number: how many there were before with the rest equal.
    """

    key: str
    members: tuple[tuple[str, int], ...]
    leader: str
    number: int = 0

    @classmethod
    def of(cls, plain: Any, caller: str) -> Self:
        """Return the identity that another worker has sent.

        Args:
            plain: what has come, of which nothing is known.
            caller: the name of the worker, which takes part.

        Raises:
            ValueError, TypeError: it is none, or none of the caller's.
        """
        key, members, leader, number = plain
        made = cls(key, tuple((name, incarnation) for name, incarnation in members), leader, number)
        names, incarnations = zip(*made.members, strict=True)
        is_sound = all(type(one) is str for one in (key, leader, *names)) and all(
            type(one) is int for one in (number, *incarnations)
        )
        if not is_sound or made.kind not in KINDS or caller not in names:
            raise ValueError(f"worker {caller!r} takes part in no such gathering")
        return made

    @property
    def kind(self) -> str:
        """Return the function of `farcall.members` by which workers take part."""
        return self.key.partition(" ")[0]


class _Arrival(NamedTuple):
    value: Any
    future: Future[Any]
    deadline: float
    wants_all: bool
    at: float  # `time.monotonic()` seconds


class Incomplete(NamedTuple):
    """A gathering that some have not called yet. `began`: `time.monotonic()` seconds."""

    what: str
    began: float
    come: list[str]
    missing: list[str]


_Arrivals = dict[str, _Arrival]  # by the name of the member


class Gatherings:
    """The gatherings that one agent takes part in, or leads. Thread-safe.

    Args:
        roll_call: makes links to those that are waited for, so that their deaths are noticed.
    """

    def __init__(
        self,
        status: Status,
        directory: Directory,
        losses: Losses,
        roll_call: RollCall,
    ) -> None:
        self._status = status
        self._directory = directory
        self._losses = losses
        self._roll_call = roll_call
        self._changed = threading.Condition()  # guards what follows
        self._numbers: dict[Ident, int] = {}  # of the next, by the ident of the first
        self._open: dict[Ident, _Arrivals] = {}
        self._failed: OrderedDict[Ident, CallError] = OrderedDict()
        self._is_watching = False
        self._is_news = False  # since the watcher has looked
        self._watchers = BriefThreads(f"farcall-gather-{status.me.name}", 1)

    # Those that take part.

    def begin(self, key: str, names: Sequence[str], leader: str) -> Ident:
        """Return which gathering this is, of those with these members.

        Raises:
            UnknownWorker, PeerLost, RpcTimeout: one of them is not there.
        """
        peers = [self._directory.resolve(name) for name in sorted(names)]
        members = tuple((peer.name, original(peer.incarnation)) for peer in peers)
        first = Ident(key, members, leader)
        with self._changed:
            number = self._numbers.get(first, 0)
            self._numbers[first] = number + 1
            if len(self._numbers) > MOST_KEPT:
                self._numbers = {one: n for one, n in self._numbers.items() if self._lives(one)}
        return first._replace(number=number)

    def _lives(self, ident: Ident) -> bool:
        peers = [self._directory.newest(number) for _, number in ident.members]
        return all(peer is not None and peer.loss_cause is None for peer in peers)

    # The leader.

    def arrive(
        self, ident: Ident, name: str, value: Any, seconds: float, *, wants_all: bool
    ) -> Future[Any]:
        """Hear that a member has come with a value; return a future of what all have brought.

        Args:
            ident: the gathering.
            name: of the member.
            value: what it brings.
            seconds: how long it waits; 0 for no limit.
            wants_all: it gets the values by name; else None, when all have come.
        """
        now = time.monotonic()
        deadline = now + (seconds or threading.TIMEOUT_MAX)
        arrival = _Arrival(value, Future(), deadline, wants_all, now)
        with self._changed:
            failure = self._failed.get(ident)
            if failure is None:
                self._open.setdefault(ident, {})[name] = arrival
                self._ring()
                begins, self._is_watching = not self._is_watching, True
        if failure is not None:
            complete_with(arrival.future, failure)
        elif begins and not self._watchers.run(self._watch, needed=False):
            self._fail(ident, CallError("the system has no thread to wait for the others"))
        return arrival.future

    def incomplete(self) -> list[Incomplete]:
        """Return the gatherings that this worker leads and that wait for a member."""
        with self._changed:
            gatherings = [(ident, dict(come)) for ident, come in self._open.items()]
        return [
            Incomplete(
                ident.kind,
                min(arrival.at for arrival in come.values()),
                sorted(come),
                [name for name, _ in ident.members if name not in come],
            )
            for ident, come in gatherings
        ]

    def _watch(self) -> None:
        """Wait until gatherings are complete, late, or lack a worker that is gone."""
        with self._losses.subscribed(self._on_peer_lost):
            while True:
                with self._changed:
                    gatherings = [(ident, dict(come)) for ident, come in self._open.items()]
                    if not gatherings or self._status.is_closed:
                        self._is_watching = False
                        return
                    self._is_news = False
                for ident, come in gatherings:
                    self._look_at(ident, come)
                with self._changed:
                    if self._open and not self._is_news:
                        end = min(_deadline(come) for come in self._open.values())
                        self._changed.wait(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))

    def _on_peer_lost(self, error: PeerLost) -> None:
        self._ring()

    def _ring(self) -> None:
        with self._changed:
            self._is_news = True
            self._changed.notify_all()

    def _look_at(self, ident: Ident, come: _Arrivals) -> None:
        missing = [name for name, _ in ident.members if name not in come]
        if time.monotonic() >= _deadline(come):
            names = ", ".join(map(repr, missing)) or "no worker, but the last came too late"
            self._fail(ident, RpcTimeout(f"{_what(ident)}: still missing at its end: {names}"))
            return
        if not missing:
            self._complete(ident, come)
            return
        peers = []
        for name, number in ident.members:
            peer = self._directory.newest(number)
            if peer is None or peer.loss_cause is not None:
                cause = "it is not known here any more" if peer is None else peer.loss().cause
                error = PeerLost(name, f"{_what(ident)}: {cause}")
                self._fail(ident, error if peer is None else peer.describe(error))
                return
            peers.append(peer)
        self._roll_call.watch(peers)

    def _complete(self, ident: Ident, come: _Arrivals) -> None:
        with self._changed:
            if self._open.pop(ident, None) is None:
                return
        values = {name: come[name].value for name, _ in ident.members}
        for arrival in come.values():
            arrival.future.set_result(values if arrival.wants_all else None)

    def _fail(self, ident: Ident, error: CallError) -> None:
        with self._changed:
            come = self._open.pop(ident, {})
            self._failed[ident] = error
            while len(self._failed) > MOST_ENDED:
                self._failed.popitem(last=False)
        for arrival in come.values():
            complete_with(arrival.future, error)

    def close(self) -> None:
        """Drop all gatherings: the agent has shut down. The ends of its links tell the others."""
        with self._changed:
            self._open.clear()
            self._ring()
        self._watchers.close(0)


def _deadline(come: _Arrivals) -> float:
    return min(arrival.deadline for arrival in come.values())


def _what(ident: Ident) -> str:
    names = ", ".join(name for name, _ in ident.members)
    return f"{ident.kind} of {names}"
