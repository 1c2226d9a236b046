"""The workers that an agent knows: the machine of the directory, with a lock, and its errors.

The rules are those of `protocol/directory.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from farcall.errors import OwnerDied, RpcTimeout, UnknownWorker
from farcall.ids import Worker, WorkerInfo, original
from farcall.log import get_logger
from farcall.plain import plain_text, whole_number
from farcall.protocol.admission import Bounds
from farcall.protocol.directory import DirectoryMachine, News, Standing, Verdict
from farcall.protocol.worker import Calls
from farcall.runtime.membership.lookup import LOOKUP_SECONDS, NotAsked
from farcall.runtime.membership.peers import IncomingCall, Peer, PendingCall
from farcall.serde import Only

logger = get_logger("farcall")

Find = Callable[[str | int, float], Worker | None]  # up to a deadline; raises `NotAsked`


class Directory:
    """Workers by name, id and incarnation. Thread-safe.

    `find` asks the rendezvous about workers that joined later, up to a deadline. `allowed` says
    what a worker of a name may do here, see `Policy.of`.

    Attributes:
        on_news: called when there may be news to `take`. It must not wait.
    """

    def __init__(
        self,
        me: Worker,
        workers: Iterable[Worker],
        find: Find | None,
        bounds: Bounds = Bounds(),  # noqa: B008  # it is immutable
        meet: Callable[[int], Calls[PendingCall, IncomingCall]] = lambda _: Calls(),
        allowed: Callable[[str], Only | None] = lambda _: None,
    ) -> None:
        self._me = me
        self._meet = meet
        self.bounds = bounds
        self._allowed = allowed
        self._find = find
        self.on_news: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._machine = machine = DirectoryMachine(self._new_peer, is_open=find is not None)
        # Of each message, and of each call: without a further step of Python.
        self.of_incarnation = machine.of_incarnation
        self.known = machine.known
        self.newest = machine.newest
        self.of_key: Callable[[str | int | WorkerInfo], Peer | None] = machine.holder
        for worker in workers:
            self.add(worker)

    def _new_peer(self, worker: Worker) -> Peer:
        me = self._me
        runs_same_program = bool(worker.main and worker.main == me.main) or (
            bool(worker.pid) and (worker.host, worker.pid) == (me.host, me.pid)
        )
        calls, only = self._meet(worker.incarnation), self._allowed(worker.name)
        return Peer(worker, runs_same_program, calls, self.bounds, only)

    # Events; see the machine.

    def add(self, worker: Worker) -> Peer:
        """Learn of a worker, or more about one. A new incarnation takes its name over."""
        with self._changing():
            return self._machine.add(worker)

    def told(self, worker: Worker) -> Peer:
        """Learn of a worker from another one. It takes no name from one that lives."""
        with self._changing():
            return self._machine.told(worker)

    def heard(self, worker: Worker) -> Peer | None:
        """Return the sender of what a link brings, or None if it is of an earlier meeting."""
        with self._changing():
            return self._machine.heard(worker)

    def meeting(self, incarnation: int) -> int:
        """Return which meeting with a worker is the present one, or the next if it is lost."""
        with self._lock:
            return self._machine.meeting(incarnation)

    def verdict(self, incarnation: int, meeting: int) -> Verdict:
        """Return what a handshake with a worker in a meeting means."""
        with self._lock:
            return self._machine.verdict(incarnation, meeting)

    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        """Hear that a worker is here again; return whether it was lost, and that is news here."""
        with self._changing():
            return self._machine.meet_again(incarnation, meeting, now)

    def on_peer_lost(self, peer: Peer, now: float) -> list[int]:
        """Hear that a peer is lost; return the incarnations that are to be discarded everywhere."""
        with self._changing():
            return self._machine.on_peer_lost(peer, now)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
            has_news = bool(self._machine.news)
        if has_news:
            self.on_news()

    def take(self) -> tuple[list[News[Peer]], list[Peer]]:
        """Return the news that were not taken yet, and the peers that are here after them."""
        with self._lock:
            news = list(self._machine.news)
            self._machine.news.clear()
            return news, self._machine.present()

    # Questions.

    def is_current(self, peer: Peer) -> bool:
        """Return whether a worker is known, and its name belongs to no other that lives."""
        with self._lock:
            return self._machine.is_current(peer)

    def can_ask(self, to: object) -> bool:
        """Return whether the rendezvous can be asked for a worker named so."""
        if self._find is None:
            return False
        try:
            plain_key(to)
        except UnknownWorker:
            return False
        return True

    def resolve(self, to: str | int | WorkerInfo, seconds: float = LOOKUP_SECONDS) -> Peer:
        """Return the live worker of that name, id or info.

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
        to = plain_key(to)
        found, worker, doubt = self._machine.resolve(to), None, ""
        if found.standing is Standing.ASK:
            try:
                worker = self._ask(to.name if isinstance(to, WorkerInfo) else to, deadline)
            except NotAsked as error:
                doubt = f"; the store at which workers meet could not be asked: {error}"
            if worker is not None and worker.loss_cause is None:
                return worker
            found = self._machine.resolve(to, asked=True)  # the worker may have dialled us
        if found.party is None:
            raise self._unknown(to, doubt, deadline)
        if found.standing is Standing.LOST:
            raise found.party.loss()
        return found.party

    def _ask(self, key: str | int, deadline: float) -> Peer | None:
        """Ask the rendezvous about a worker, and remember it."""
        worker = self._find(key, deadline) if self._find is not None else None
        return None if worker is None else self.add(worker)

    def _unknown(self, to: str | int | WorkerInfo, doubt: str, deadline: float) -> Exception:
        to = to.name if isinstance(to, WorkerInfo) else to
        kind = "name" if isinstance(to, str) else "id"
        names = ", ".join(f"{p.name!r} (id {p.worker.id})" for p in self.live())
        error_type = RpcTimeout if doubt and time.monotonic() >= deadline else UnknownWorker
        return error_type(
            f"{self._me.name!r} could not find destination {kind} {to!r}{doubt}; known workers: "
            f"{names}"
        )

    def find(self, name: str, deadline: float) -> None:
        """Ask the rendezvous about a worker, and remember what it says, if it can be asked."""
        try:
            self._ask(name, deadline)
        except NotAsked as error:
            logger.warning("%s: can't look up worker %r: %s", self._me.name, name, error)

    def meet(self, name: str, incarnation: int, deadline: float) -> None:
        """Learn of an incarnation that was heard of, from the rendezvous.

        Raises:
            RpcTimeout: the store could not be asked.
            OwnerDied: it is not in the group any more.
        """
        if self.newest(incarnation) is not None:
            return
        try:
            self._ask(name, deadline)
        except NotAsked as error:
            if self.newest(incarnation) is not None:  # it has dialled us meanwhile
                return
            raise RpcTimeout(
                f"worker {name!r}, to which a reference leads, is not known here, and the store at "
                f"which workers meet could not be asked: {error}"
            ) from error
        if self.newest(original(incarnation)) is None:
            raise OwnerDied(name, "it is not in the group any more")

    def live(self) -> list[Peer]:
        """Return the peers that are not lost, by id; this worker is among them."""
        live = [peer for peer in self.all() if peer.loss_cause is None]
        return sorted(live, key=lambda peer: peer.worker.id)

    def all(self) -> list[Peer]:
        """Return every incarnation that was met and is not discarded."""
        with self._lock:
            return self._machine.parties()


def plain_key(to: object) -> str | int | WorkerInfo:
    """Return what a worker is named by, of a type that the machine knows.

    Raises:
        UnknownWorker: nothing that names a worker.
    """
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str):
        return plain_text(to)
    try:
        return whole_number("id", to)
    except TypeError:
        raise UnknownWorker(
            f"a worker is named by a str, an int or a WorkerInfo, not by {type(to).__name__}"
        ) from None
