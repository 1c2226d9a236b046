"""Decide the steps of one worker in one supervision that it knows: hear, tell, and supervise.

    event                          the worker
    -----------------------------  ------------------------------------------------------------
    begin, on the user's behalf    leads
    hear of a state                takes it if it counts; drops objects that it does not have
    ... in which all is over       forgets the plan and the snapshots, and tells others once
    ... and its supervisor dies    tells the other keepers, if it would be the successor
    look: it is the successor      leads, in a term of its own, if it has the plan
    look: it is not                leads no more
    look: a worker was met again   tells that worker of the state here, and hears of its state
    look: the supervisor is gone   asks the successor for its last state, and hands on the plan
    the successor can't keep it    takes the next one for the successor
    ... which is this worker       asks and tells the next one
    look: an owner was met again   asks that owner for a usable reference to the object
    a user kills an object here    tells the keepers

The successor may lack the plan, so a worker that has the plan sends it along with the state.
`succession` has the rules by which states, objects and snapshots are compared (SUP-5 and SUP-6),
and `leading` has the rules of the supervisor (SUP-7).

The machine is pure, and not thread-safe: the owner holds a lock around each event, and carries out,
without the lock, the instructions that `take` returns. The functions that instructions bring along
are events as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from farcall.protocol.leading import AGAIN_SECONDS, Leading
from farcall.protocol.standing import Edition, Keeper, SupervisionAnswer, SupervisionState, Term
from farcall.protocol.succession import Editions, KeptSnapshots, successor
from farcall.protocol.supervision_instructions import (
    Adopt,
    After,
    Ask,
    AskState,
    DropObjects,
    Failed,
    Hear,
    Instruction,
    LetGo,
    Present,
    Question,
    SupervisionPlan,
    Surroundings,
    TakesOver,
    TellKilled,
)


class Knowledge:
    """A supervision, as one worker knows it.

    Args:
        state: the first that it hears of. It is heard by `hear` as well.
        snapshots: that this worker keeps.
        editions: the objects of the supervision that it has.
    """

    leading_type = Leading  # the simulator plants mistakes in it

    def __init__(
        self,
        state: SupervisionState,
        around: Surroundings,
        snapshots: KeptSnapshots[Any],
        editions: Editions[Any],
    ) -> None:
        self.state = state
        self.plan: SupervisionPlan | None = None  # None if this worker can't take over
        self.leading: Leading | None = None  # if it supervises
        self._around = around
        self._snapshots = snapshots
        self._editions = editions
        self._heard_at = around.now()
        self._has_ended = False
        self._has_told_keepers = False  # of the end, since its supervisor has died
        self._asked: dict[int, int] = {}  # child -> meeting with the owner that was asked for it
        # The term of a supervisor that is gone, and the successor that was asked for its last news.
        self._consulted: tuple[Term | None, Keeper | None] = (None, None)
        self._unable: set[int] = set()  # meetings with successors that can't keep the plan
        self._met: dict[int, int] = {}  # worker -> the last meeting in which it was told and asked
        self._to_do: list[Instruction] = []

    def take(self) -> list[Instruction]:
        """Return the instructions since the last call, once."""
        to_do = list(self._to_do)
        self._to_do.clear()
        return to_do

    # States.

    def begin(self, plan: SupervisionPlan) -> None:
        """Supervise: the user has asked for it here."""
        self.hear(self.state, plan)
        self._lead(plan, is_first=True).look()

    def hear(
        self,
        state: SupervisionState,
        plan: SupervisionPlan | None = None,
        *,
        passes_on: bool = False,
    ) -> SupervisionAnswer:
        """Hear how the supervision is, and how it is to be. Only newer states count.

        Args:
            passes_on: it does not come from the supervisor, so that the end is told to all others.
        """
        before = self.state
        if state.order > before.order:
            self.state, self._heard_at = state, self._around.now()
        elif state.order == before.order:
            self.state = before.plus(state, self._around.is_usable)
        self._to_do.append(LetGo([before]))
        known = self.state
        self.plan = self.plan or plan
        self._drop(self._editions.drop_outdated(known))
        if known.is_over:
            self._to_do.append(LetGo([self.plan, *self._snapshots.discard(known.key)]))
            self.plan = None
            if not self._has_ended:
                self._after(0.0, self._pass_on, known, passes_on)
        self._has_ended = known.is_over
        self._after(0.0, self.look)
        if known.order > state.order:
            return SupervisionAnswer(other=known)
        return SupervisionAnswer(missing=tuple(self._editions.missing(known, self._around.me.name)))

    def adopt(self, state: SupervisionState, plan: SupervisionPlan) -> SupervisionAnswer:
        """Hear of a state and keep the plan.

        This worker takes over even if the supervisor dies before it has told of its new keeper.
        """
        keepers = dict.fromkeys([*state.keepers, self._around.me.keeper])
        return self.hear(state._replace(keepers=tuple(keepers)), plan)

    # Children that live here.

    def make(self, child: int, edition: Edition, made: Any, state: SupervisionState) -> bool:
        """Hear that a child is to be made here; return whether it counts.

        Args:
            state: of the supervisor, which may die before it has told of its term.
        """
        self.hear(state)
        counts, outdated = self._editions.make(child, edition, made, self.state)
        self._drop(outdated)
        return counts

    def killed(self, made: Any) -> None:
        """Hear that the user has killed an object here: if it is a child, it is not made again."""
        found = self._editions.killed(made)
        if found is not None:
            for name, _ in self.state.keepers:
                self._to_do.append(Ask(name, TellKilled(*found), None))

    def heard_killed(self, child: int, edition: Edition) -> None:
        """Hear that the user has killed an object of another worker."""
        self._after(0.0, self._ended, child, edition)

    def _ended(self, child: int, edition: Edition) -> None:
        if self.leading is not None:
            self.leading.ended(child, edition)

    def _drop(self, outdated: list[Any]) -> None:
        if outdated:
            self._to_do.append(DropObjects(outdated))

    # Supervising.

    def look(self) -> None:
        """Look who is there: a worker has come or gone, or there is news."""
        state, me, others = self.state, self._around.me, self._around.others()
        able = [one for one in others if one.meeting not in self._unable]
        if self.plan is not None or not able:
            able.append(me)
        first = successor(state.keepers, [(one.id, one.keeper) for one in able])
        if self.plan is None or first != me.keeper:
            self._retire()
        elif self.leading is None or self.leading.state.term != state.term:
            self._retire()
            self._to_do.append(TakesOver(state.names, state.keepers[0][0]))
            self._lead(self.plan, is_first=False)
        self._exchange(others)
        if self.leading is not None:
            self.leading.look()
        else:
            self._ask_owners(others)
            self._consult(first, others)
            self._tell_keepers(others)

    def fail_start(self, error: Exception) -> None:
        """Give up, unless it has started."""
        if self.leading is not None:
            self.leading.fail_start(error)

    def _lead(self, plan: SupervisionPlan, *, is_first: bool) -> Leading:
        self.leading = self.leading_type(
            plan,
            self._around,
            self.state,
            self._heard_at,
            self._snapshots,
            partial(self._publish, plan),
            self._to_do,
            is_first=is_first,
        )
        return self.leading

    def _publish(
        self, plan: SupervisionPlan, state: SupervisionState, passes_on: bool
    ) -> SupervisionAnswer:
        return self.hear(state, plan, passes_on=passes_on)

    def _retire(self) -> None:
        leading, self.leading = self.leading, None
        if leading is not None:
            leading.retire()
            self._to_do.append(LetGo([leading]))

    # Questions and news between workers of which none, or another one, supervises.

    def _ask_owners(self, others: list[Present]) -> None:
        """Ask owners that were lost here by mistake, and met again, for usable references."""
        meetings = {one.name: one.meeting for one in others}
        for number, child in enumerate(self.state.children):
            is_void = child.is_running and not child.has_usable(self._around.is_usable)
            meeting = meetings.get(child.owner)
            if not is_void or meeting is None:
                self._asked.pop(number, None)
            elif self._asked.get(number) != meeting:
                self._asked[number] = meeting
                self._ask(child.owner, AskState(self.state.names[number]), self._on_state)

    def _consult(self, first: Keeper, others: list[Present]) -> None:
        """Ask the successor of a supervisor that is gone for its last state.

        Two workers that have heard different states may take each other for the successor, so it
        is told of this one, too. With the plan, if it is here: one that heard of an end, which the
        supervisor before did not, has dropped its own.
        """
        state, at = self.state, (self.state.term, first)
        if state.is_over or first == state.keepers[0] or self._consulted == at:
            return
        self._consulted = at
        for peer in others:
            if peer.keeper == first:
                self._ask(peer.name, AskState(state.names[0]), self._on_state)
                self._tell_successor(peer, state, is_bare=False)

    def _tell_successor(self, to: Present, state: SupervisionState, *, is_bare: bool) -> None:
        question: Question = Hear(state, is_bare)
        if self.plan is not None:
            question = Adopt(self.plan, state, is_bare)
        done = partial(self._successor_told, to, state, is_bare, self.plan is not None)
        self._ask(to.name, question, done)

    def _successor_told(
        self, to: Present, state: SupervisionState, was_bare: bool, has_plan: bool, answer: Any
    ) -> None:
        """Tell the successor barely what it could not take: it has not met an owner."""
        if not isinstance(answer, Failed):
            return
        if not was_bare:
            self._tell_successor(to, state, is_bare=True)
        elif answer.may_pass:
            self._consulted = (None, None)
            self._after(AGAIN_SECONDS, self.look)
        elif has_plan:
            self._unable.add(to.meeting)
            self.look()  # the next one is the successor

    def _exchange(self, others: list[Present]) -> None:
        """Tell those that were lost by mistake, and met again, of the state here, and ask them."""
        for peer in others:
            if peer.meeting != peer.number and self._met.get(peer.number) != peer.meeting:
                self._met[peer.number] = peer.meeting
                news = Hear(self.state, is_bare=True, passes_on=True)
                self._ask(peer.name, news, self._on_news)

    def _pass_on(self, state: SupervisionState, to_keepers: bool) -> None:
        """Tell others of the end: its supervisor may not reach them, and tells it once."""
        if state.leader_id == self._around.me.id:
            return
        for peer in self._around.others():
            if to_keepers or peer.keeper not in state.keepers:
                self._to_do.append(Ask(peer.name, Hear(state, passes_on=to_keepers), None))

    def _tell_keepers(self, others: list[Present]) -> None:
        """Tell all keepers of the end, if its supervisor died, perhaps while it told them.

        One that has not heard of it asks this worker, and may have asked before this one had heard.
        """
        state, me = self.state, self._around.me
        there = [(one.id, one.keeper) for one in (me, *others)]
        is_gone = all(keeper != state.keepers[0] for _, keeper in there)
        if not state.is_over or not is_gone or self._has_told_keepers:
            return
        if successor(state.keepers, there) == me.keeper:
            self._has_told_keepers = True
            for peer in others:
                if peer.keeper in state.keepers:
                    self._to_do.append(Ask(peer.name, Hear(state), None))

    def _on_news(self, answer: SupervisionAnswer | Failed) -> None:
        if isinstance(answer, SupervisionAnswer) and answer.other is not None:
            self.hear(answer.other, passes_on=True)

    def _on_state(self, answer: SupervisionState | Failed | None) -> None:
        if isinstance(answer, SupervisionState):
            self.hear(answer, passes_on=True)

    # Instructions.

    def _ask(self, to: str, question: Question, done: Callable[..., object], *args: Any) -> None:
        self._to_do.append(Ask(to, question, partial(done, *args)))

    def _after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self._to_do.append(After(seconds, partial(act, *args)))
