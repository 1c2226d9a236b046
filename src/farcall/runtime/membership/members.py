"""Members tell each other where a worker is when the store does not say so.

The store comes first. If it has not answered for a moment, or is gone, members that are linked are
asked, too, and the first answer counts. A member tells of those that it knows and that live, as far
as it knows. A dialler says in the handshake where it listens, so a group whose members are
linked finds newcomers and those that came back without the store.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable

import msgspec

from farcall.ids import Worker, original
from farcall.log import get_logger
from farcall.runtime.control import ControlMessages
from farcall.runtime.membership.directory import Directory, Find
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.lookup import NotAsked, StoreIsLate
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.records import is_possible
from farcall.wire.messages import ThisIs, WhoIs

logger = get_logger("farcall")

HEAD_START = 0.25  # seconds that the store has before members are asked
PIECE = 0.1  # seconds of one wait for the store, after that
ANSWER_SECONDS = 2.0  # that members have where there is no store to wait for
ASK_AGAIN = 1.0  # seconds between two rounds of questions for one key
MOST_ASKED = 8  # members that are asked in a round


class _Round:
    """Questions for one key, which several threads may wait for."""

    def __init__(self, asked: Iterable[int]) -> None:
        self.at = time.monotonic()
        self._open = set(asked)  # incarnations that have not answered
        self._changed = threading.Condition()
        self._found: Worker | None = None

    def answer(self, sender: int, found: Worker | None) -> None:
        """Take a member's answer. No effect if it was not asked, or has answered before."""
        with self._changed:
            if sender in self._open:
                self._open.discard(sender)
                self._found = self._found or found
                self._changed.notify_all()

    def wait(self, deadline: float) -> Worker | None:
        """Wait for an answer, until no member is left that could give one.

        Args:
            deadline: `time.monotonic()` seconds.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._found is not None or not self._open,
                max(0.0, deadline - time.monotonic()),
            )
            return self._found


class Members:
    """The members of an agent's group, as those that can be asked. Thread-safe.

    Args:
        me: this worker.
        store: asks the store, see `Lookup.find`; None for a group of fixed size.
        directory: learns what members say.
    """

    def __init__(
        self,
        me: Worker,
        store: Find | None,
        directory: Directory,
        links: Links,
        control: ControlMessages,
    ) -> None:
        self._me = me
        self._store = store
        self._directory = directory
        self._links = links
        self._control = control
        self._lock = threading.Lock()
        self._rounds: dict[str | int, _Round] = {}  # the latest of each key, for `ASK_AGAIN`

    def find(self, key: str | int, deadline: float) -> Worker | None:
        """Return the live worker of this name or id, or None if the store says there is none.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            NotAsked: neither the store nor a member has said so by the deadline.
        """
        if self._store is None:
            return None
        until = min(deadline, time.monotonic() + HEAD_START)
        while True:
            try:
                return self._store(key, until)
            except NotAsked as error:
                is_late = isinstance(error, StoreIsLate)
                questions = self._ask(key)
                patience = 0.0 if is_late else ANSWER_SECONDS
                found = questions.wait(min(deadline, questions.at + patience))
                if found is not None:
                    logger.debug("%s: a member knows where %r is", self._me.name, found.name)
                    return found
                now = time.monotonic()
                if not is_late or now >= deadline:
                    raise
            until = min(deadline, now + PIECE)

    def _ask(self, key: str | int) -> _Round:
        """Ask members about a key, or return the questions that were asked just now."""
        now = time.monotonic()
        with self._lock:
            self._rounds = {k: old for k, old in self._rounds.items() if now < old.at + ASK_AGAIN}
            latest = self._rounds.get(key)
            if latest is not None:
                return latest
            linked = [peer for peer in self._directory.live() if self._is_linked(peer)]
            asked = random.sample(linked, min(MOST_ASKED, len(linked)))
            latest = self._rounds[key] = _Round(peer.incarnation for peer in asked)
        for peer in asked:
            self._control.post(peer.incarnation, WhoIs(key), 0)
        return latest

    def _is_linked(self, peer: Peer) -> bool:
        if peer.worker is self._me:
            return False
        return peer.back_link is not None or self._links.linked(peer) is not None

    # In the leader's thread.

    def on_question(self, peer: Peer, message: WhoIs) -> None:
        """Answer a member that asks where a worker is."""
        known = self._directory.known(message.key)
        worker = None
        if known is not None and known.worker.addresses:
            incarnation = original(known.incarnation)
            worker = msgspec.structs.replace(known.worker, incarnation=incarnation)
        self._control.post(peer.incarnation, ThisIs(message.key, worker), 0)

    def on_answer(self, peer: Peer, message: ThisIs) -> None:
        """Take a member's answer. An answer without a question does not count."""
        key, worker = message.key, message.worker
        questions = self._rounds.get(key)
        if questions is None:
            return
        if worker is None or not self._is_answer(key, worker):
            questions.answer(peer.incarnation, None)
        else:
            is_gone = self._directory.told(worker).loss_cause is not None
            questions.answer(peer.incarnation, None if is_gone else worker)

    @staticmethod
    def _is_answer(key: str | int, worker: Worker) -> bool:
        """Return whether this may be the worker that was asked for, as it describes itself."""
        return is_possible(worker) and key in (worker.name, worker.id)
