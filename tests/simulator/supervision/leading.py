"""A supervisor under simulation: what `supervision/leader.py` does, with the shipped machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from farcall.protocol.succession import Edition, Term, edition_now
from farcall.protocol.supervision import (
    Candidate,
    Phase,
    Strategy,
    SupervisionMachine,
    Target,
    choose,
)
from farcall.supervision.leader import AGAIN_SECONDS, SNAPSHOT_KEEPERS
from farcall.supervision.plans import Answer, ChildState, State, is_usable
from simulator.supervision.world import Group, Member, Unreachable

KEY = 1  # of the only supervision


class Plan(NamedTuple):
    """A supervision as its user wants it."""

    targets: tuple[str, ...]  # the workers that the children are wanted on
    strategy: Strategy
    restarts: int
    per: float
    every: float  # seconds between snapshots; 0: none are taken


class Handlers(Protocol):
    """The functions that run on other workers: see `handlers`."""

    group: Group
    plan: Plan
    takes_snapshots: bool

    @property
    def now(self) -> float: ...

    def hear(
        self, member: Member, state: State, *, can_lead: bool = False, passes_on: bool = False
    ) -> Answer: ...
    def adopt(self, member: Member, plain: Any, keeper: Any) -> Any: ...
    def heard(self, member: Member, plain: Any) -> Any: ...
    def make(self, member: Member, leader: SimLeader, at: Any, plain: Any, saved: Any) -> Any: ...
    def save(self, member: Member, number: int) -> int: ...
    def keep(self, member: Member, child: int, number: Any, snapshot: int) -> None: ...
    def takes_over(self, member: Member, term: Term) -> None: ...
    def restores(self, member: Member, child: int, saved: Any) -> None: ...


class SimLeader:
    """Supervises, for as long as it is the first keeper.

    Args:
        is_first: it begins, and takes over from no other.
    """

    def __init__(
        self, world: Handlers, me: Member, state: State, heard_at: float, *, is_first: bool
    ) -> None:
        self.me = me
        self.is_retired = False
        self._world = world
        self._group = world.group
        self.state = state
        self._children = list(state.children)
        self._asked: dict[int, int] = {me.number: 0}
        self._keepers = [keeper for keeper in state.keepers if me.is_alive(keeper)]
        if me.keeper not in self._keepers:
            self._keepers.insert(0, me.keeper)
        for _, number in self._keepers:
            self._asked[number] = me.meetings.get(number) or 0
        self._counts = [0] * len(self._children)
        self._spread_to: dict[int, tuple[Any, set[int]]] = {}
        plan = world.plan
        self._machine = SupervisionMachine(
            len(self._children), plan.strategy, plan.restarts, plan.per
        )
        if is_first:
            self._machine.begin()
            return
        self.state = state._replace(epoch=state.epoch + 1, leader_id=me.number, version=0)
        phases = [Phase(child.phase) for child in self._children]
        generations = [child.edition.generation for child in self._children]
        self._machine.resume(phases, generations, [heard_at - age for age in state.ages])
        for child in range(len(self._children)):
            world.restores(me, child, me.snapshots.get(KEY, child))
        me.snapshots.take_over(KEY, self.state.term, [one.edition for one in self._children])
        world.takes_over(me, self.state.term)
        for child, before in enumerate(state.children):
            if before.is_running:
                self._begin_snapshots(child, before.edition.generation)
        self._tell()

    def look(self) -> None:
        if self._machine.is_over:
            return
        self._enlist()
        gone = [
            child
            for child, state in enumerate(self._children)
            if self._machine.phases[child] is Phase.RUNNING
            and (state.rref is None or not is_usable(state.rref))
        ]
        if gone:
            self._machine.lost(gone, "a death", self._world.now)
        self._go_on()

    def ended(self, child: int, edition: Edition) -> None:
        if self._children[child].edition == edition:
            self._machine.ended(child, edition.generation)
            self._go_on()

    def _go_on(self) -> None:
        for child, generation in self._machine.take():
            if not self._machine.is_over:
                self._make(child, generation)
        self._tell()

    # Keepers.

    def _others(self) -> list[int]:
        return [number for number, meeting in self.me.meetings.items() if meeting is not None]

    def _enlist(self) -> None:
        for number in self._others():
            meeting = self.me.meetings[number] or 0
            if self._asked.get(number) != meeting:
                self._asked.pop(number, None)
                self._asked[number] = meeting
                keeper = self._group.members[number].keeper
                serve = partial(self._world.adopt, plain=self.state.plain(), keeper=keeper)
                self._call(number, serve, partial(self._adopted, keeper))

    def _adopted(self, keeper: tuple[str, int], answer: Any) -> None:
        if not self._hear(answer):
            self._asked.pop(keeper[1], None)
            self._keepers = [one for one in self._keepers if one != keeper]
            self._post(self.look, AGAIN_SECONDS)
        else:
            order = list(self._asked)
            self._keepers = sorted({*self._keepers, keeper}, key=lambda one: order.index(one[1]))
        self._tell()

    def _hear(self, answer: Any) -> bool:
        """Hear of a state that counts at another worker; return whether there was an answer."""
        if isinstance(answer, Unreachable):
            return False
        if not isinstance(answer, Answer):
            answer = Answer.of(answer)
        if answer.other is not None:
            self._world.hear(self.me, answer.other, can_lead=True, passes_on=True)
        missing = [
            one for one in answer.missing if self._children[one.child].edition == one.edition
        ]
        for one in missing:
            if one.was_killed:
                self._machine.ended(one.child, one.edition.generation)
        dropped = [one.child for one in missing if not one.was_killed]
        if dropped:
            self._machine.lost(dropped, "another supervisor", self._world.now)
        if missing:
            self._go_on()
        return True

    def _told(self, number: int, version: int, answer: Any) -> None:
        if not self._hear(answer):
            self._post(partial(self._tell_again, number, version), AGAIN_SECONDS)

    def _tell_again(self, number: int, version: int) -> None:
        if version == self.state.version and self.me.reaches(number):
            self._tell_one(number)

    def _tell_one(self, number: int) -> None:
        serve = partial(self._world.heard, plain=self.state.plain())
        self._call(number, serve, partial(self._told, number, self.state.version))

    def _tell(self) -> None:
        machine = self._machine
        for child, state in enumerate(self._children):
            phase, generation = machine.phases[child], machine.generations[child]
            edition = edition_now(state.edition, phase, generation, self.state.term)
            rref = state.rref if phase is Phase.RUNNING else None
            self._children[child] = ChildState(phase.value, edition, state.owner, rref)
        self._keepers = [keeper for keeper in self._keepers if self.me.is_alive(keeper)]
        news = self.state._replace(
            keepers=tuple(self._keepers),
            given_up=machine.given_up,
            children=tuple(self._children),
        )
        if news == self.state and news.version:
            return
        ages = tuple(self._world.now - time for time in machine.times)
        self.state = news._replace(version=news.version + 1, ages=ages)
        mine = self._world.hear(self.me, self.state, can_lead=True)
        if mine.missing:
            self._post(partial(self._hear, mine), 0.0)
        for number in self._others():
            self._tell_one(number)
        for child in range(len(self._children)):
            self._spread(child)

    # Children.

    def _make(self, child: int, generation: int) -> None:
        there = [Candidate(f"w{n}", n, "") for n in (self.me.number, *self._others())]
        load = {state.owner: 1 for state in self._children if state.is_running}
        target = Target(self._world.plan.targets[child], "")
        chosen = choose(target, there, load, str(self.me), waits=False)
        assert chosen is not None
        edition = Edition(*self.state.term, generation)
        self._children[child] = self._children[child]._replace(owner=chosen.name, edition=edition)
        saved = self.me.snapshots.get(KEY, child)
        self._world.restores(self.me, child, saved)
        plain = self.state.plain(is_bare=True)
        at = child, edition
        serve = partial(self._world.make, leader=self, at=at, plain=plain, saved=saved)
        self._call(chosen.id, serve, partial(self._made, child, generation))

    def _made(self, child: int, generation: int, answer: Any) -> None:
        try:
            if isinstance(answer, Unreachable):
                raise answer
            rref = answer.taken_by(self.me)
        except Unreachable:
            self._machine.failed(child, generation, "an error", self._world.now)
            self._go_on()
            return
        if self._machine.made(child, generation):
            self._children[child] = self._children[child]._replace(rref=rref)
            self._begin_snapshots(child, generation)
            self._spread(child)
        self._go_on()

    # Snapshots.

    def _begin_snapshots(self, child: int, generation: int) -> None:
        self._counts[child] = 0
        if self._world.plan.every:
            self._post(partial(self._take, child, generation), self._world.plan.every)

    def _take(self, child: int, generation: int) -> None:
        rref: Any = self._children[child].rref
        is_same = self._machine.generations[child] == generation
        if rref is None or not is_same or self._machine.is_over or not self._world.takes_snapshots:
            return
        serve = partial(self._world.save, number=rref.number)
        self._call(rref.owner, serve, partial(self._taken, child, generation))

    def _taken(self, child: int, generation: int, answer: Any) -> None:
        self._post(partial(self._take, child, generation), self._world.plan.every)
        if isinstance(answer, Unreachable):
            return
        self._counts[child] += 1
        number = (*self.state.term, generation, self._counts[child])
        self._world.keep(self.me, child, number, answer)
        self._spread(child)

    def _spread(self, child: int) -> None:
        found = self.me.snapshots.get(KEY, child)
        if found is None:
            return
        owner = self._children[child].owner
        others = [n for name, n in self._keepers if name not in (str(self.me), owner)]
        number, have = self._spread_to.get(child, (found[0], set()))
        have = have & set(others) if number == found[0] else set()
        for to in others[:SNAPSHOT_KEEPERS]:
            if to not in have:
                keep = partial(self._world.keep, child=child, number=found[0], snapshot=found[1])
                self._call(to, keep)
        self._spread_to[child] = (found[0], {*have, *others[:SNAPSHOT_KEEPERS]})

    # Calls.

    def _call(
        self,
        to: int,
        serve: Callable[[Member], object],
        done: Callable[[Any], None] | None = None,
    ) -> None:
        def answered(answer: object) -> None:
            if done is not None and not self.is_retired:
                done(answer)

        self._group.call(self.me, to, serve, answered)

    def _post(self, work: Callable[[], object], delay: float) -> None:
        def do() -> None:
            if not self.is_retired:
                work()

        self._group.agenda.at(self._world.now + delay, self.me, do)
