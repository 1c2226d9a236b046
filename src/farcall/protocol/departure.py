"""How a fixed group of workers leaves together: everybody ready, nothing in flight, then go.

The live worker with the lowest id leads. When it is ready itself it asks all (DRAIN, in rounds);
each answers (DRAINED) when its user has called shutdown and it is idle, with a number that
grows whenever it becomes active. Two rounds with the same answers mean that every worker was idle
from its first answer to its second: at the moment between the rounds all were idle at once, no
message was under way, and nothing can start again (Mattern, "Algorithms for Distributed
Termination Detection", 1987: the double count). Then the leader dismisses everybody.

Nobody waits for the dead: a lost worker is struck from the list, and the next lowest id leads.

Pure; not thread-safe. Methods return what has to be sent: (incarnation, message).
"""

from __future__ import annotations

from farcall.wire.messages import Dismiss, Drain, Drained, Message

Messages = list[tuple[int, Message]]


class Departure:
    """One worker's part. `members` are (id, incarnation) of the whole group, this one included."""

    def __init__(self, me: int, members: list[tuple[int, int]]) -> None:
        self._me = me
        self._members = sorted(members)
        self._ready = False
        self._idle_epoch: int | None = None  # None: busy
        # Who asked us, in which round, and has no answer yet. Several: a dead leader's last
        # question may come after its successor's first one.
        self.asked: dict[int, int] = {}
        self._round = 0
        self._answers: dict[int, int] = {}
        self._previous: dict[int, int] | None = None
        self.dismissed = False

    @property
    def leader(self) -> int:
        """Incarnation of the live member with the lowest id."""
        return self._members[0][1]

    @property
    def missing(self) -> list[int]:
        """Whom we wait for: at the leader, those that are not ready and idle; else, the leader."""
        if self.leader != self._me:
            return [self.leader]
        return [inc for _, inc in self._members if inc not in self._answers]

    def ready(self) -> Messages:
        """The user has called shutdown."""
        self._ready = True
        return self._start_round() if self.leader == self._me else self._answer()

    def idle(self, epoch: int) -> Messages:
        """No call is in flight and no handler runs.

        Args:
            epoch: is greater than the last time if any call has begun since.
        """
        self._idle_epoch = epoch
        return self._answer()

    def busy(self) -> None:
        self._idle_epoch = None

    def on_drain(self, sender: int, message: Drain) -> Messages:
        self.asked[sender] = message.round
        return self._answer()

    def on_drained(self, sender: int, message: Drained) -> Messages:
        if message.round != self._round or self.leader != self._me:
            return []
        self._answers[sender] = message.epoch
        return self._finish_round()

    def on_dismiss(self) -> None:
        self.dismissed = True

    def lost(self, peer: int) -> Messages:
        """A member died, or left on its own."""
        was_leader = self.leader
        self._members = [(i, inc) for i, inc in self._members if inc != peer]
        self._answers.pop(peer, None)
        self.asked.pop(peer, None)
        if self._previous is not None:
            self._previous.pop(peer, None)
        if not self._ready or self.leader != self._me:
            return []
        return self._start_round() if was_leader != self._me else self._finish_round()

    def _start_round(self) -> Messages:
        self._round += 1
        self._answers = {}
        return [(inc, Drain(self._round)) for _, inc in self._members]

    def _answer(self) -> Messages:
        if not self._ready or self._idle_epoch is None:
            return []
        asked, self.asked = self.asked, {}
        return [(sender, Drained(number, self._idle_epoch)) for sender, number in asked.items()]

    def _finish_round(self) -> Messages:
        if self._round == 0 or self.missing:
            return []
        if self._answers != self._previous:
            self._previous = self._answers
            return self._start_round()
        others: Messages = [(inc, Dismiss()) for _, inc in self._members if inc != self._me]
        self.dismissed = True
        return others
