"""Decide the steps of one worker in one backward pass.

The machine is told which messages have arrived, and which gradients torch's engine has computed. It
decides which nodes of the graph are run next, which gradients are sent, and when the pass is over
or has failed.

A *source* is a place where gradients enter this worker's graph: the roots, or the tensors that the
worker sent in one message. A *receive* is a place where gradients leave this graph: the tensors
that the worker received in one message. Sources are numbered in the order of sending; receives,
askers and errors are whatever the owner of the machine uses for them. A *part* is a source or a
receive, with the indices of its used tensors. Two waves go through the workers of a pass:

- PREPARE finds out which sources are live, where that must be known. A worker answers its PREPARE
  when all those that it caused are answered, so the answer at the root means that the wave is over
  everywhere.
- GRADIENTS computes. Each message carries credit of the pass (`credit`).

    state     event                            next      effect
    --------  -------------------------------  --------  ----------------------------------------
    NEW       explored, sources share nothing  ALONE
    NEW       explored, anything else          WAITING
    ALONE     arrive                           ALONE     Run: others need not be known
    WAITING   arrive, the first                WAITING   AskRoot; in fast mode, as `begin`
    WAITING   arrive, a later one              WAITING   it waits for `begin`
    WAITING   begin, live ones share nothing   APART     Run for each that has arrived
    WAITING   begin, live ones share nodes     TOGETHER  RunTogether, the latest source first
    APART     arrive                           APART     Run
    TOGETHER  arrive                           TOGETHER  the run waits for it no more
    any       survey                           same      the first: Explore the roots
    any       reached                          same      Ask for each part; if there is none, Answer
    any       prepared                         same      Answer askers that wait for no other part
    any       computed                         same      Keep leaf gradients, Send the others
    any       left                             same      Send, if the receive has all its gradients
    any       ran                              same      Return the rest of the source's credit
    any       ran, the last, and averages      same      Average; then, when `averaged`, Return
    any       credit_returned, not all         same      (at the root)
    any       credit_returned, all             OVER      End; or Unused, if fast mode was wrong
    any       pass_failed                      same      AskCause (at the root)
    any       fail, lost (was sent gradients)  FAILED    Stop, Answer all, End at the root, TellRoot
    any       stop, lost (the root)            FAILED    the same, and the root is not told
    any       abort                            FAILED    the same, and TellAll, once
    FAILED    abort, the first                 FAILED    TellAll
    FAILED    all else                         FAILED    nothing; an asker gets the error
    OVER      any                              OVER      nothing

Invariants (tests cite them):

BWD-1  Gradients are those of the same model in one process: a receive's are sent when all of its
       used tensors have theirs, and a run that needs several sources waits for all of them.
BWD-2  Each receive that is used sends its gradients once; a receive that is not used sends none.
BWD-3  At the root, OVER means that no worker has credit, so none has anything left to do. Leaf
       gradients are kept before the last credit of their source goes.
BWD-5  At the root every pass is OVER or FAILED in the end, FAILED only for a reason, and each asker
       is answered. Every death of a worker that has credit is noticed: a chain of workers, each of
       which got its credit from the one before, leads from the root to it. The first dead worker of
       that chain got its credit from a living one, which remembers the workers to which it sent
       gradients.
BWD-6  Once a pass has FAILED at the root, every worker that has the context by then is told along
       the links of the context (`contexts`), if the root lives.
BWD-7  In fast mode no pass is OVER if a tensor that was sent is unused.

A run may wait for sources in descending order: at this worker, a source's gradient depends only on
tensors that were sent after the source, so cycles between workers can't block. The machine is not
thread-safe: its owner holds one lock, and carries out the instructions, in order, without the lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from farcall.protocol import pass_instructions as do
from farcall.protocol.credit import HeldCredit, RecoveredCredit
from farcall.protocol.pass_instructions import Instruction, Part

ROOT = (1 << 40) - 1  # the roots at the worker that began the pass: above the numbers of all sends


class UnexpectedGradient(Exception):
    """A gradient came for a source that is not live, or a second one."""


SURVEY = object()  # asks for what the roots reach: all that wait for `survey`


class PassState(Enum):
    """See the module's description. OVER and FAILED are beside these."""

    NEW = auto()
    ALONE = auto()
    WAITING = auto()
    APART = auto()
    TOGETHER = auto()


class PassMachine:
    """See the module's description.

    Args:
        me: this worker.
        root: the worker that began the pass.
        is_fast: every source is live.
        averages: this worker averages the gradients of leaves with other processes.

    Attributes:
        state: the state.
        error: what the pass failed with.
        is_over: at the root, whether it has ended without an error.
        is_announced: whether its failure was told to all.
        is_root: whether the pass began here.
    """

    credit = HeldCredit
    recovered_credit = RecoveredCredit

    def __init__(self, me: object, root: object, *, is_fast: bool, averages: bool = False) -> None:
        self.state = PassState.NEW
        self.error: Any = None
        self.is_over = False
        self.is_announced = False
        self.is_root = me == root
        self._me = me
        self._root = root
        self._is_fast = is_fast
        self._averages = averages
        self._is_shared = False
        self._live: set[int] = set()
        self._askers: dict[Part, tuple[Any, set[Part]]] = {}  # and what it waits for, of our own
        self._causes: dict[Part, Part] = {}  # part that PREPARE was sent for -> what caused it
        self._surveyors: list[Any] = []
        self._is_surveyed = False
        self._early: list[tuple[int, int]] = []  # source and credit
        self._pending: set[int] = set()  # live, without a gradient
        self._arrived: set[int] = set()
        self._running = 0
        self._credit = self.credit()
        self._incomplete: dict[Hashable, int] = {}  # receive -> how many used tensors lack theirs
        self._sent_to: set[Any] = set()
        self._recovered = self.recovered_credit()
        self._missing: dict[Any, int] = {}

    @property
    def needs_survey(self) -> bool:
        """Return whether the root must know the live sources before it delivers its own."""
        return self.state is PassState.WAITING and not self._is_fast

    @property
    def missing(self) -> int:
        """Return how many live sources have no gradient yet."""
        return len(self._pending)

    @property
    def is_asked(self) -> bool:
        """Return whether a worker waits for an answer, or a gradient for `begin`."""
        return bool(self._askers or self._surveyors or self._early)

    # Which sources are live.

    def explored(self, is_shared: bool, *, has_sent: bool = True) -> None:
        """Take in whether two sources share parts, and whether there are sends. Not in fast mode.

        A worker that averages must know its last source, if the roots are not the only one.
        """
        if self.state is not PassState.NEW:
            return
        is_alone = not is_shared and not (self._averages and has_sent)
        self.state = PassState.ALONE if is_alone else PassState.WAITING

    def explored_all(self, is_shared: bool, reached: Mapping[int, Iterable[Part]]) -> None:
        """Take in the live sources, and the parts that each reaches first. Only in fast mode."""
        if self.state is not PassState.NEW:
            return
        self._is_shared = is_shared
        for source, parts in reached.items():
            self._note(source, parts)
        self.state = PassState.WAITING

    def _note(self, source: int, parts: Iterable[Part]) -> None:
        self._live.add(source)
        for receive, *used in parts:
            self._incomplete[receive] = self._incomplete.get(receive, 0) + len(used)

    def survey(self, asker: Any) -> list[Instruction]:
        """Find out everywhere, from the root, which sources are live."""
        if self.error is not None or self._is_surveyed:
            return [do.AnswerAsker(asker, self.error)]
        self._surveyors.append(asker)
        return [do.ExploreRoots()] if len(self._surveyors) == 1 else []

    def reached(
        self, source: int, used: Iterable[int], parts: Sequence[Part], asker: Any
    ) -> list[Instruction]:
        """PREPARE came: tensors of a source are used, and reach these parts as the first."""
        if self.error is not None:
            return [do.AnswerAsker(asker, self.error)] if asker is not SURVEY else []
        self._note(source, parts)
        if not parts:
            return self._answer(asker)
        part = (source, *used)
        self._askers[part] = asker, set(parts)
        self._causes.update(dict.fromkeys(parts, part))
        return [do.AskPart(each) for each in parts]

    def prepared(self, reached: Part) -> list[Instruction]:
        """Hear that the PREPARE for a part of a receive was answered."""
        if self.error is not None:
            return []
        part = self._causes.pop(reached)
        asker, waits_for = self._askers[part]
        waits_for.discard(reached)
        if waits_for:
            return []
        del self._askers[part]
        return self._answer(asker)

    def _answer(self, asker: Any) -> list[Instruction]:
        if asker is not SURVEY:
            return [do.AnswerAsker(asker, None)]
        self._is_surveyed = True
        surveyors, self._surveyors = self._surveyors, []
        return [do.AnswerAsker(each, None) for each in surveyors]

    def begin(self, is_shared: bool) -> list[Instruction]:
        """Hear that all live sources are known, and whether any of them share something.

        Raises:
            UnexpectedGradient: as `arrive`.
        """
        if self.error is not None or self.state is not PassState.WAITING:
            return []
        self.state = PassState.TOGETHER if is_shared else PassState.APART
        self._pending = set(self._live)
        early, self._early = self._early, []
        for source, credit in early:
            self._take(source, credit)
        if is_shared:
            return [do.RunTogether(self._in_order())]
        return [do.RunSource(source) for source, _ in early]

    def _in_order(self) -> list[int]:
        return sorted(self._live, reverse=True)

    # Gradients.

    def arrive(self, source: int, credit: int) -> list[Instruction]:
        """Hear that the gradient of a source is here, with credit of the pass.

        Raises:
            UnexpectedGradient: the source is not live, or has its gradient already.
        """
        if self.error is not None:
            return []
        if self.state is PassState.WAITING:
            self._early.append((source, credit))
            if len(self._early) > 1:
                return []  # the first one has seen to it
            return self.begin(self._is_shared) if self._is_fast else [do.AskRoot()]
        self._take(source, credit)
        return [] if self.state is PassState.TOGETHER else [do.RunSource(source)]

    def _take(self, source: int, credit: int) -> None:
        is_live = self.state is PassState.ALONE or source in self._pending
        if source in self._arrived or not is_live:
            raise UnexpectedGradient(source)
        self._arrived.add(source)
        self._pending.discard(source)
        self._running += 1
        self._credit.arrive(source, credit)

    def computed(
        self, source: int, receives: Mapping[Any, Any]
    ) -> list[do.KeepLeaves | do.SendGradients]:
        """Take the receives that a source's own run has gradients of, each with its peer.

        The root gives its credit back to itself, so there it costs nothing to keep some of it for
        what can be done while others work. Elsewhere all of it goes with the last message, if
        nothing has to be done or said after that.
        """
        gives_all = not (self.is_root or self._averages or self._is_fast)
        sends: list[do.KeepLeaves | do.SendGradients] = []
        for count, (receive, peer) in enumerate(receives.items(), 1):
            sends.append(self._send(source, receive, peer, gives_all and count == len(receives)))
        return [*sends, do.KeepLeaves()] if self.is_root else [do.KeepLeaves(), *sends]

    def left(self, source: int, receive: Any, peer: Any) -> list[do.SendGradients]:
        """Count, in a run of all sources, one more tensor of a receive as having its gradient."""
        self._incomplete[receive] -= 1
        return [] if self._incomplete[receive] else [self._send(source, receive, peer)]

    def _send(self, source: int, receive: Any, peer: Any, last: bool = False) -> do.SendGradients:
        self._sent_to.add(peer)
        return do.SendGradients(receive, self._credit.send(source, last))

    def ran(self, source: int) -> list[Instruction]:
        """Hear that what a source set off at this worker is done."""
        if self.error is not None:
            return []
        if self._averages and not self._pending and self._running == 1:
            return [do.AverageLeaves(source)]
        return self.averaged(source)

    def averaged(self, source: int) -> list[Instruction]:
        """Hear that nothing is left to do for a source."""
        if self.error is not None:
            return []
        self._running -= 1
        credit = self._credit.ran(source)
        if credit is None:
            return []
        missing = self.missing if self._is_fast else -1
        if self.is_root:
            return self.credit_returned(self._me, credit, missing)
        return [do.ReturnCredit(credit, missing)]

    # The end.

    def credit_returned(self, worker: Any, credit: int, missing: int) -> list[Instruction]:
        """Hear, at the root, that a worker gave credit back.

        Args:
            worker: which.
            credit: of the pass.
            missing: how many of its sources have no gradient, in fast mode.
        """
        if self.error is not None or self.is_over or not self.is_root:
            return []
        # The number at a worker only falls, and its last message says the final one.
        self._missing[worker] = min(missing, self._missing.get(worker, missing))
        if not self._recovered.add(credit):
            return []
        unused = {worker: count for worker, count in self._missing.items() if count > 0}
        if unused:
            return [do.FailUnused(unused)]
        self.is_over = True
        return [do.EndPass(None)]

    def pass_failed(self, peer: Any) -> list[Instruction]:
        """Hear, at the root, that the pass has failed at a peer."""
        goes_on = self.is_root and self.error is None and not self.is_over
        return [do.AskCause(peer)] if goes_on else []

    def on_peer_lost(self, peer: Any, worker: object, error: Any) -> list[Instruction]:
        """Hear that a worker is gone. Its incarnation, `peer`, may have been sent gradients."""
        if not self.is_root and worker == self._root:
            return self.stop(error)
        return self.fail(error) if peer in self._sent_to else []

    def fail(self, error: Any) -> list[Instruction]:
        """Hear that something went wrong, here or at a worker that was asked."""
        stopped = self.stop(error)
        return [*stopped, do.TellRoot()] if stopped and not self.is_root else stopped

    def stop(self, error: Any) -> list[Instruction]:
        """End the pass here; the root knows or does not care."""
        if self.error is not None or self.is_over:
            return []
        self.error = error
        askers = [asker for asker, _ in self._askers.values() if asker is not SURVEY]
        askers += self._surveyors
        self._askers, self._surveyors, self._causes, self._early = {}, [], {}, []
        answers = [do.AnswerAsker(asker, error) for asker in askers]
        return [do.StopPass(), *answers, *([do.EndPass(error)] if self.is_root else [])]

    def abort(self, error: Any) -> list[Instruction]:
        """End the pass: it has failed at the root, as a worker or the root itself says."""
        stopped = self.stop(error)
        if self.is_announced or self.is_over:
            return stopped
        self.is_announced = True
        return [*stopped, do.TellAll()]
