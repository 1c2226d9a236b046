"""The workers that an agent knows: by name, id and incarnation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from farcall.errors import OwnerDied, RpcTimeout, UnknownWorker
from farcall.ids import Worker, WorkerInfo, meeting_of, next_incarnation, original
from farcall.log import get_logger
from farcall.protocol.admission import Bounds
from farcall.protocol.worker import Calls
from farcall.runtime.membership.lookup import LOOKUP_SECONDS, NotAsked
from farcall.runtime.membership.peers import IncomingCall, Peer, PendingCall

logger = get_logger("farcall")

Find = Callable[[str | int, float], Worker | None]  # up to a deadline; raises `NotAsked`

FORGET_SECONDS = 600.0  # after which a lost worker is forgotten, where workers come and go

_KEY_TYPES = frozenset((str, int, WorkerInfo))


class Directory:
    """Workers by name, id and incarnation. Thread-safe.

    `find` asks the rendezvous about workers that joined later, up to a deadline.
    """

    def __init__(
        self,
        me: Worker,
        workers: Iterable[Worker],
        find: Find | None,
        bounds: Bounds = Bounds(),  # noqa: B008  # it is immutable
        meet: Callable[[int], Calls[PendingCall, IncomingCall]] = lambda _: Calls(),
    ) -> None:
        self._me = me
        self._meet = meet
        self._bounds = bounds
        self._find = find
        self._lock = threading.Lock()
        self._by_incarnation: dict[int, Peer] = {}
        self._lost: deque[tuple[float, Peer]] = deque()  # each with when that was
        self._forgotten: deque[tuple[float, int]] = deque()
        self._by_key: dict[str | int | WorkerInfo, Peer] = {}
        self._met_again: dict[int, int] = {}  # by the original incarnation: that of now
        # Of each message: without a step of Python.
        self.of_incarnation: Callable[[int], Peer | None] = self._by_incarnation.get
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> Peer:
        """Learn of a worker, or more about one. A new incarnation takes its name over.

        Args:
            worker: with the incarnation that it has here, or with its original one.
        """
        with self._lock:
            worker = self._as_met(worker)
            peer = self._by_incarnation.get(worker.incarnation)
            if peer is None:
                peer = Peer(
                    worker,
                    self._runs_same_program(worker),
                    self._meet(worker.incarnation),
                    self._bounds,
                )
                self._by_incarnation[worker.incarnation] = peer
            elif (worker.pid and not peer.worker.pid) or (
                worker.addresses and not peer.worker.addresses
            ):  # until now it was known from its hello, which says less
                peer.worker = worker
            for key in (worker.name, worker.id, worker.info):
                self._by_key[key] = peer
            return peer

    def _as_met(self, worker: Worker) -> Worker:
        """The worker with the incarnation that it has here. Lock held."""
        now = self._met_again.get(original(worker.incarnation), 0)
        if meeting_of(worker.incarnation):
            self._met_again[original(worker.incarnation)] = max(now, worker.incarnation)
        elif now:
            return msgspec.structs.replace(worker, incarnation=now)
        return worker

    def newest(self, incarnation: int) -> Peer | None:
        """What a worker is here now, or was last, by its original incarnation."""
        return self._by_incarnation.get(self._met_again.get(incarnation, incarnation))

    def meeting(self, incarnation: int) -> int:
        """Which meeting with a worker is the present one, or the next if it is lost."""
        now = self._met_again.get(incarnation, incarnation)
        peer = self._by_incarnation.get(now)
        return meeting_of(now) + (peer is not None and peer.lost is not None)

    def is_current(self, peer: Peer) -> bool:
        """Whether nobody has taken a worker's name over, and it is not forgotten."""
        return self._by_key.get(peer.name) is peer

    def meet_again(self, worker: Worker, now: float) -> bool:
        """A worker that was lost is here again.

        Args:
            worker: with the incarnation that it has here from now on.
            now: `time.monotonic()` seconds.

        Returns:
            Whether that is news here.
        """
        incarnation = original(worker.incarnation)
        with self._lock:
            last = self._met_again.get(incarnation, incarnation)
            if last >= worker.incarnation:
                return False
            self._met_again[incarnation] = worker.incarnation
            old = self._by_incarnation.get(last)
            if old is not None and self._find is None:
                self._lost.append((now, old))
        self.add(worker)
        return True

    def note_lost(self, peer: Peer, now: float) -> list[int]:
        """A peer was lost, at `now` (`time.monotonic()` seconds).

        Where workers come and go those that are gone would fill the memory, and anywhere what was
        of meetings before the last one. So they are forgotten here after `FORGET_SECONDS`, and
        everywhere else after as much again: by then all has been handled that was told of them
        while they were known.

        Returns:
            The incarnations that are to be forgotten everywhere now.
        """
        before = now - FORGET_SECONDS
        with self._lock:
            if self._find is not None:  # else nobody takes their places
                self._lost.append((now, peer))
            while self._lost and self._lost[0][0] < before:
                old = self._lost.popleft()[1]
                self._by_incarnation.pop(old.incarnation, None)
                begun = original(old.incarnation)
                if self._met_again.get(begun, begun) == old.incarnation:
                    # Others know longer that it was lost.
                    self._met_again[begun] = next_incarnation(old.incarnation)
                for key in [key for key, known in self._by_key.items() if known is old]:
                    del self._by_key[key]
                self._forgotten.append((now, old.incarnation))
            gone = []
            while self._forgotten and self._forgotten[0][0] < before:
                incarnation = self._forgotten.popleft()[1]
                gone.append(incarnation)
                begun = original(incarnation)
                again = next_incarnation(incarnation)
                if self._met_again.get(begun) == again and again not in self._by_incarnation:
                    del self._met_again[begun]
        return gone

    def _runs_same_program(self, worker: Worker) -> bool:
        if worker.main and worker.main == self._me.main:
            return True
        return bool(worker.pid) and (worker.host, worker.pid) == (self._me.host, self._me.pid)

    def of_id(self, worker_id: int) -> Peer | None:
        """The newest worker of this id that is known, lost or not."""
        return self._by_key.get(worker_id)

    def known(self, to: object) -> Peer | None:
        """The live worker of that name, id or info, if it is known here. Never waits."""
        # Not a bool: True would be found as worker 1.
        peer = self._by_key.get(to) if type(to) in _KEY_TYPES else None  # type: ignore[call-overload]
        return peer if peer is not None and peer.lost is None else None

    def can_ask(self, to: object) -> bool:
        """Whether the rendezvous can be asked for one named so."""
        return self._find is not None and type(to) in _KEY_TYPES

    def resolve(self, to: str | int | WorkerInfo, seconds: float = LOOKUP_SECONDS) -> Peer:
        """The live worker of that name, id or info.

        Args:
            to: whom.
            seconds: what the rendezvous has to answer if the worker is not known here.

        Raises:
            UnknownWorker: there is none, or `to` is something else.
            PeerLost: there was one, and it is gone.
            RpcTimeout: it is not known here, and the rendezvous has not answered in time.
        """
        return self.known(to) or self.look_up(to, time.monotonic() + seconds)

    def look_up(self, to: object, deadline: float) -> Peer:
        """`resolve` for one that is not `known`, with a deadline in `time.monotonic()` seconds."""
        if not isinstance(to, str | int | WorkerInfo) or isinstance(to, bool):
            raise UnknownWorker(
                f"a worker is named by a str, an int or a WorkerInfo, not by {type(to).__name__}"
            )
        known = self._by_key.get(to)
        if known is not None and known.lost is None:
            return known
        if isinstance(to, WorkerInfo):
            to = to.name
        doubt = ""
        try:
            worker = self._find(to, deadline) if self._find is not None else None
        except NotAsked as error:
            worker = None
            doubt = f"; the store at which workers meet could not be asked: {error}"
        if worker is not None:
            known = self.add(worker)
            if known.lost is None:
                return known
        if known is not None:
            raise known.loss()
        kind = "name" if isinstance(to, str) else "id"
        names = ", ".join(f"{p.name!r} (id {p.worker.id})" for p in self.live())
        error_type = RpcTimeout if doubt and time.monotonic() >= deadline else UnknownWorker
        raise error_type(
            f"{self._me.name!r} could not find destination {kind} {to!r}{doubt}; known workers: "
            f"{names}"
        )

    def find(self, name: str, deadline: float) -> Worker | None:
        """Ask the rendezvous about a worker, and remember it. None also if it can't be asked."""
        try:
            worker = self._find(name, deadline) if self._find is not None else None
        except NotAsked as error:
            logger.warning("%s: can't look up worker %r: %s", self._me.name, name, error)
            return None
        if worker is not None:
            self.add(worker)
        return worker

    def meet(self, name: str, incarnation: int, deadline: float) -> None:
        """Learn of an incarnation that was heard of, from the rendezvous.

        Raises:
            RpcTimeout: the store could not be asked.
            OwnerDied: it is not in the group any more.
        """
        if self.newest(incarnation) is not None:
            return
        try:
            worker = self._find(name, deadline) if self._find is not None else None
        except NotAsked as error:
            raise RpcTimeout(
                f"worker {name!r}, to which a reference leads, is not known here, and the store at "
                f"which workers meet could not be asked: {error}"
            ) from error
        if worker is not None:
            self.add(worker)
        if worker is None or original(worker.incarnation) != original(incarnation):
            raise OwnerDied(name, "it is not in the group any more")

    def live(self) -> list[Peer]:
        """Peers that are not lost, by id; this worker is among them."""
        with self._lock:
            peers = [peer for peer in self._by_incarnation.values() if peer.lost is None]
        return sorted(peers, key=lambda peer: peer.worker.id)

    def all(self) -> list[Peer]:
        """Every incarnation that was met and is not forgotten."""
        with self._lock:
            return list(self._by_incarnation.values())
