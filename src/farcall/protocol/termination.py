"""Let a fixed group of workers leave together, once all are ready and nothing is in flight.

The live worker with the lowest id leads. When the leader is ready itself, it asks all members
(DRAIN, in rounds); each answers (DRAINED) when its user has called shutdown and it is idle, with a
number that grows whenever it becomes active. Two rounds with the same answers mean that every
worker was idle from its first answer to its second: at the moment between the rounds all were idle
at once, no message was under way, and nothing can start again (Mattern, "Algorithms for Distributed
Termination Detection", 1987: the double count). Then the leader dismisses all.

No worker waits for the dead: a lost worker is struck from the list, and the next lowest id leads. A
worker that is stopped, or whose host went dark, is not known to be dead. So a worker that waits
keeps asking the workers that it waits for whether they are there (`Silence`). The processes answer,
not the users, so an answer comes even while a function computes.

    state    event                             next   effect
    -------  --------------------------------  -----  -------------------------------------------
    WORKING  idle, on_drain                    same   remembered
    WORKING  lost                              same   the member is struck from the list
    WORKING  ready, at the leader              READY  a round: DRAIN to all members
    WORKING  ready, elsewhere                  READY  if idle: DRAINED to all that have asked
    READY    idle, on_drain                    same   if idle: DRAINED to all that have asked
    READY    on_drained, of an old round       same   ignored
    READY    on_drained, the last one; the     same   a round
               first, or answers are new
    READY    on_drained, the last one; the     -      DISMISS to all others; dismissed
               answers of the round before
    READY    lost, and this worker leads now   same   a round
    READY    lost, at the leader               same   it counts as an answer
    any      on_dismiss, by the leader         -      dismissed
    any      on_dismiss, by another worker     same   the other one takes our leader for dead

Of each worker that is waited for (`Silence`):

    event                            effect
    -------------------------------  -------------------------------
    unanswered, for `bound` seconds  the peer is to be declared lost
    answered                         its silence is over

Invariants:

DEP-1 (not too early) No worker is dismissed while a live one is not ready, waits for a call, or
      serves one. A call of a dead worker does not count: no caller waits for it. A worker that was
      given up and goes on is dead for the workers that gave it up. If it has the lowest id it leads
      the other workers, which leave with it.
DEP-2 (all go) When all the living are ready and nothing is in flight any more, all are dismissed.
DEP-3 (patience) A worker whose process answers within the bound is waited for, however long its
      user takes. Time in which the asker itself stood still does not count.
DEP-4 (bound) A worker that answers nothing is waited for no longer than `bound` seconds of
      questions after the last answer, and one question more.
DEP-5 (order) The number in a worker's answer is never smaller than the numbers before.

The machine is pure, and not thread-safe. Methods return the messages that have to be sent:
(incarnation, message).
"""

from __future__ import annotations

from farcall.wire.messages import Dismiss, Drain, Drained, Message

Messages = list[tuple[int, Message]]

QUESTIONS = 6  # in a row, that take the whole bound
LONGEST_QUESTION = 5.0  # seconds
SHORTEST_QUESTION = 1.0  # seconds, unless the bound is shorter
STANDSTILL = 1.5  # a question that took so many times its time was not asked all the while


class Silence:
    """Since when those that are waited for have not answered. Seconds of questions count.

    Args:
        bound: seconds; 0: no worker is given up.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        shortest = min(bound, SHORTEST_QUESTION)
        self.question = min(LONGEST_QUESTION, max(bound / QUESTIONS, shortest)) or LONGEST_QUESTION
        self._silent: dict[int, float] = {}

    def answered(self, peer: int) -> None:
        """Hear that a worker's process is there."""
        self._silent.pop(peer, None)

    def unanswered(self, peer: int, seconds: float) -> bool:
        """Note that a question had no answer: it had `question` seconds, and took this many.

        Returns:
            Whether the worker is to be declared lost.
        """
        if seconds > STANDSTILL * self.question:
            return False
        silent = self._silent[peer] = self._silent.get(peer, 0.0) + seconds
        return 0.0 < self._bound <= silent


class TerminationDetector:
    """One worker's part. `members` are (id, incarnation) of the whole group, this one included."""

    def __init__(self, me: int, members: list[tuple[int, int]]) -> None:
        self._me = me
        self._members = sorted(members)
        self._ready = False
        self._idle_epoch: int | None = None  # None while busy
        # The round of each worker that asked and has no answer yet. Several: a dead leader's last
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
        """The workers to wait for: at the leader, those not ready and idle; else, the leader."""
        if self.leader != self._me:
            return [self.leader]
        return [inc for _, inc in self._members if inc not in self._answers]

    def ready(self) -> Messages:
        """Hear that the user has called shutdown."""
        self._ready = True
        return self._start_round() if self.leader == self._me else self._answer()

    def idle(self, epoch: int) -> Messages:
        """Hear that no call is in flight and no handler runs.

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
        is_awaited = message.round == self._round and self.leader == self._me
        if is_awaited:
            self._answers[sender] = message.epoch
        return self._finish_round() if is_awaited else []

    def on_dismiss(self, sender: int) -> None:
        """Follow the sender out. It may have given up members that this worker still counts."""
        self.dismissed = self.dismissed or sender == self.leader

    def on_peer_lost(self, peer: int) -> Messages:
        """Hear that a member died, or left on its own."""
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
