"""Decide which workers keep the plan, make objects and are told: the rules of the supervisor.

The supervisor is the first *keeper*; the other keepers are the workers that have the plan, in the
order in which they take over. The supervisor asks each worker that is there to be a keeper, once in
each meeting, and tells all of each change of the state. It has each child that `SupervisionMachine`
asks for made from the child's last snapshot. A worker that may answer when it is asked again is
asked again after `AGAIN_SECONDS`.

SUP-7 (an heir) If other workers are there, a supervision has started only when one of them has the
      plan, and has heard of a state in which all children run and this worker is a keeper. The
      start does not wait for a worker that can't keep the plan. The others have `ADOPTION_SECONDS`
      to answer.

`Knowledge` makes this machine, passes events on to it, and adds its instructions to those of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from farcall.protocol.standing import (
    ChildState,
    Edition,
    Number,
    SupervisionAnswer,
    SupervisionState,
)
from farcall.protocol.succession import KeptSnapshots, edition_now
from farcall.protocol.supervision import Candidate, Phase, SupervisionMachine, choose
from farcall.protocol.supervision_instructions import (
    Adopt,
    After,
    Ask,
    Failed,
    GivenUp,
    Hear,
    Instruction,
    Keep,
    LetGo,
    MakeChild,
    NoSnapshot,
    NotMade,
    Present,
    Question,
    Save,
    Started,
    SupervisionPlan,
    Surroundings,
)

ADOPTION_SECONDS = 2.0  # that others have to say that they could take over, before it starts
AGAIN_SECONDS = 0.5  # until a worker is asked again, if it is there
LEAST_SECONDS = 0.001  # of a wait: a clock may round its rest to nothing
SNAPSHOT_KEEPERS = 2  # that have each snapshot, beside the owner and the supervisor


class Leading:
    """Supervises, until it is retired. Not thread-safe.

    Args:
        state: as it was before.
        heard_at: when the state was heard of, in seconds of `Surroundings.now`.
        snapshots: that this worker keeps.
        publish: hears of each state, as this worker, with whether another one supervises in it.
        to_do: takes the instructions.
        is_first: it begins, and takes over from no other.
    """

    def __init__(
        self,
        plan: SupervisionPlan,
        around: Surroundings,
        state: SupervisionState,
        heard_at: float,
        snapshots: KeptSnapshots[Any],
        publish: Callable[[SupervisionState, bool], SupervisionAnswer],
        to_do: list[Instruction],
        *,
        is_first: bool,
    ) -> None:
        self.state = state
        self.is_retired = False
        self._plan = plan
        self._around = around
        self._snapshots = snapshots
        self._publish = publish
        self._to_do = to_do
        self._is_starting = is_first
        self._is_patient = True  # with those that were asked to be keepers
        self._children = list(state.children)
        me, present = around.me, {one.keeper: one for one in around.others()}
        present[me.keeper] = me
        self._keepers = [keeper for keeper in state.keepers if keeper in present]
        if me.keeper not in self._keepers:
            self._keepers.insert(0, me.keeper)
        # Those that were asked to be keepers, in the order in which they take over.
        # Each with its present meeting: a worker that was lost by mistake is asked again.
        self._asked = {me.number: me.meeting}
        self._asked |= {keeper[1]: present[keeper].meeting for keeper in self._keepers}
        self._to_come = 0  # answers of those
        self._paused: set[int] = set()  # meetings with those that are asked again after a while
        self._heirs: set[int] = set()  # meetings with keepers that know that all run
        self._unable: set[int] = set()  # meetings with workers that can't be keepers
        self._unplaced: dict[int, tuple[int, float]] = {}  # child -> generation, since when
        self._counts = [0] * len(self._children)  # of snapshots, of this generation
        self._lacks = [""] * len(self._children)  # why there was no snapshot the last time
        self._spread_to: dict[int, tuple[Number, set[str]]] = {}  # child -> those with a snapshot
        self._machine = SupervisionMachine(
            len(self._children), plan.strategy, plan.restarts, plan.per
        )
        if is_first:
            self._machine.begin()
            self._after(ADOPTION_SECONDS, self._wait_no_longer)
        else:
            self._take_over(state, heard_at)

    def _take_over(self, state: SupervisionState, heard_at: float) -> None:
        me = self._around.me
        self.state = state._replace(epoch=state.epoch + 1, leader_id=me.id, version=0)
        phases = [Phase(child.phase) for child in state.children]
        editions = [child.edition for child in state.children]
        generations = [edition.generation for edition in editions]
        self._machine.resume(phases, generations, [heard_at - age for age in state.ages])
        self._snapshots.take_over(state.key, self.state.term, editions)
        for child, before in enumerate(state.children):
            if before.is_running:
                self._begin_snapshots(child, before.edition.generation)
        self._tell()

    def retire(self) -> None:
        """Do nothing any more: another worker supervises. References wait for what it makes."""
        self.is_retired = True
        if self._is_starting:
            self._to_do.append(Started())

    # Events.

    def look(self) -> None:
        """Look who is there: a worker has come or gone, or time has passed."""
        if self._machine.is_over:
            return
        self._enlist()
        gone = [
            child
            for child, state in enumerate(self._children)
            if self._machine.phases[child] is Phase.RUNNING
            and not state.has_usable(self._around.is_usable)
        ]
        if gone:
            owners = ", ".join(sorted({repr(self._children[child].owner) for child in gone}))
            why = f"{self._names_of(gone)} was lost with {owners}"
            self._machine.on_children_lost(gone, why, self._around.now())
        self._go_on()

    def ended(self, child: int, edition: Edition) -> None:
        """Count a child as ended, since the user has killed it."""
        if self._children[child].edition == edition:
            self._machine.ended(child, edition.generation)
            self._go_on()

    def fail_start(self, error: Exception) -> None:
        """Give up, unless all was made before. The caller of `supervise` hears of this."""
        if self._is_starting and not self._machine.is_over:
            self._to_do.append(Started(error))
            self._machine.given_up = f"it could not be made: {error}"
            self._go_on()
            self._is_starting = False

    def _go_on(self) -> None:
        if self._machine.is_over:
            self._unplaced.clear()
        for child, generation in self._machine.take():
            self._unplaced[child] = (generation, self._around.now())
        for child, (generation, since) in list(self._unplaced.items()):
            self._place(child, generation, since)
        self._tell()

    def _names_of(self, children: list[int]) -> str:
        return ", ".join(repr(self.state.names[child]) for child in children)

    # Keepers.

    def _enlist(self) -> None:
        """Have all members that are there keep the state that a successor needs."""
        for peer in self._around.others():
            is_due = peer.meeting not in self._paused
            if is_due and self._asked.get(peer.number) != peer.meeting:
                self._asked.pop(peer.number, None)  # it comes last now
                self._asked[peer.number] = peer.meeting
                self._to_come += 1
                self._ask(peer.name, Adopt(self._plan, self.state), self._adopted, peer)

    def _adopted(self, peer: Present, answer: SupervisionAnswer | Failed) -> None:
        self._to_come -= 1
        if isinstance(answer, SupervisionAnswer):
            self._hear(answer)
            order = list(self._asked)
            keepers = {*self._keepers, peer.keeper}
            self._keepers = sorted(keepers, key=lambda one: order.index(one[1]))
        elif answer.may_pass:
            self._asked.pop(peer.number, None)
            self._paused.add(peer.meeting)
            self._keepers = [one for one in self._keepers if one != peer.keeper]
            self._after(AGAIN_SECONDS, self._adopt_again, peer)
        else:
            self._unable.add(peer.meeting)
        self._tell()

    def _adopt_again(self, peer: Present) -> None:
        self._paused.discard(peer.meeting)
        self.look()

    def _hear(self, answer: SupervisionAnswer) -> None:
        """Hear of a state that counts at another worker, or of what that does not have."""
        if answer.other is not None:
            self._publish(answer.other, True)
        missing = [
            one for one in answer.missing if self._children[one.child].edition == one.edition
        ]
        for one in missing:
            if one.was_killed:
                self._machine.ended(one.child, one.edition.generation)
        dropped = [one.child for one in missing if not one.was_killed]
        if dropped:
            why = f"another supervisor had {self._names_of(dropped)} ended"
            self._machine.on_children_lost(dropped, why, self._around.now())
        if missing:
            self._go_on()

    def _tell(self) -> None:
        """Tell every worker how it is now, if that is news."""
        machine = self._machine
        for child, state in enumerate(self._children):
            phase, generation = machine.phases[child], machine.generations[child]
            edition = edition_now(state.edition, phase, generation, self.state.term)
            rref = state.rref if phase is Phase.RUNNING else None
            self._children[child] = ChildState(phase.value, edition, state.owner, rref)
        others = self._around.others()
        alive = {self._around.me.keeper, *(one.keeper for one in others)}
        self._keepers = [keeper for keeper in self._keepers if keeper in alive]
        news = self.state._replace(
            keepers=tuple(self._keepers),
            given_up=machine.given_up,
            children=tuple(self._children),
        )
        if news != self.state or not news.version:
            ages = tuple(self._around.now() - time for time in machine.times)
            self.state = news._replace(version=news.version + 1, ages=ages)
            if machine.given_up and not self._is_starting:
                self._to_do.append(GivenUp(news.names, machine.given_up))
            mine = self._publish(self.state, False)
            if mine.missing:
                self._after(0.0, self._hear, mine)
            for peer in others:
                self._tell_one(peer)
            for child in range(len(self._children)):
                self._spread(child)
        self._note_start()

    def _tell_one(self, peer: Present) -> None:
        self._ask(peer.name, Hear(self.state), self._told, peer, self.state)

    def _told(
        self, peer: Present, state: SupervisionState, answer: SupervisionAnswer | Failed
    ) -> None:
        """Take in that another worker has heard of a state, or could not."""
        if isinstance(answer, SupervisionAnswer):
            if answer.other is None and state.all_run and peer.keeper in state.keepers:
                self._heirs.add(peer.meeting)
            self._hear(answer)
        elif answer.may_pass:
            self._after(AGAIN_SECONDS, self._tell_again, peer, state.version)
        else:
            self._unable.add(peer.meeting)
        self._note_start()

    def _tell_again(self, peer: Present, version: int) -> None:
        if version == self.state.version and peer in self._around.others():
            self._tell_one(peer)

    # The start.

    def _wait_no_longer(self) -> None:
        self._is_patient = False
        self._note_start()

    def _note_start(self) -> None:
        if not self._is_starting or not self.state.all_run or self.state.is_over:
            return
        self._enlist()  # those that were met when a child was made
        if self._to_come and self._is_patient:
            return
        able = [one.meeting for one in self._around.others() if one.meeting not in self._unable]
        if not able or self._heirs.intersection(able):
            self._is_starting = False
            self._to_do.append(Started())

    # Children.

    def _place(self, child: int, generation: int, since: float) -> None:
        """Make a child on a worker, if there is one for it."""
        around, target = self._around, self._plan.targets[child]
        waited = around.now() - since
        is_awaited = bool(target.name) and around.may_come(target.name)
        waits = is_awaited and generation > 1 and waited < self._plan.wait
        there = [Candidate(one.name, one.id, one.role) for one in (around.me, *around.others())]
        load = Counter(state.owner for state in self._children if state.is_running)
        chosen = choose(target, there, load, around.me.name, waits=waits)
        if chosen is not None:
            del self._unplaced[child]
            self._make(child, generation, chosen.name)
        elif waits:
            left = max(self._plan.wait - waited, LEAST_SECONDS)
            self._after(left, self._go_on)
        elif not around.may_come(around.me.name):  # no worker will
            del self._unplaced[child]
            error = LookupError(f"no worker of the role {target.role!r} is left")
            self._after(0.0, self._made, child, generation, Failed(error, may_pass=False))

    def _make(self, child: int, generation: int, owner: str) -> None:
        edition = Edition(*self.state.term, generation)
        self._children[child] = self._children[child]._replace(owner=owner, edition=edition)
        saved = self._snapshots.get(self.state.key, child)
        question = MakeChild(self._plan, child, edition, self.state, saved)
        self._ask(owner, question, self._made, child, generation)

    def _made(self, child: int, generation: int, answer: Any) -> None:
        """Take in that a child was made, or could not be made."""
        if isinstance(answer, Failed):
            self._not_made(child, generation, answer.error)
            return
        if self._machine.made(child, generation):
            self._children[child] = self._children[child]._replace(rref=answer)
            self._begin_snapshots(child, generation)
            self._spread(child)
        self._go_on()

    def _not_made(self, child: int, generation: int, error: Any) -> None:
        name, owner = self.state.names[child], self._children[child].owner
        if self._is_starting:
            self.fail_start(error)
            return
        why = f"{name!r} could not be made on {owner!r}: {type(error).__name__}: {error}"
        self._to_do.append(NotMade(why))
        self._machine.failed(child, generation, why, self._around.now())
        self._go_on()

    # Snapshots.

    def _begin_snapshots(self, child: int, generation: int) -> None:
        self._counts[child] = 0
        every = self._plan.every[child]
        if every:
            self._after(every, self._take, child, generation)

    def _take(self, child: int, generation: int) -> None:
        """Take a snapshot of a child, unless it is another by now."""
        state = self._children[child]
        is_same = self._machine.generations[child] == generation
        if state.rref is None or not is_same or self._machine.is_over:
            return
        question = Save(self._plan, child, state.rref)
        self._ask(state.owner, question, self._taken, child, generation)

    def _taken(self, child: int, generation: int, answer: Any) -> None:
        self._after(self._plan.every[child], self._take, child, generation)
        if isinstance(answer, Failed):
            if str(answer.error) != self._lacks[child]:  # each time would fill the log
                self._lacks[child] = str(answer.error)
                self._to_do.append(NoSnapshot(self.state.names[child], answer.error))
            return
        self._lacks[child] = ""
        self._counts[child] += 1
        number = (*self.state.term, generation, self._counts[child])
        dropped = self._snapshots.put(self.state.key, child, number, answer)
        self._to_do.append(LetGo([dropped]))
        self._spread(child)

    def _spread(self, child: int) -> None:
        """Have others keep the last snapshot of a child, too."""
        found = self._snapshots.get(self.state.key, child)
        if found is None:
            return
        without = self._around.me.name, self._children[child].owner
        others = [name for name, _ in self._keepers if name not in without]
        number, have = self._spread_to.get(child, (found[0], set()))
        have = have & set(others) if number == found[0] else set()
        for name in others[:SNAPSHOT_KEEPERS]:
            if name not in have:
                self._to_do.append(Ask(name, Keep(child, *found), None))
        self._spread_to[child] = (found[0], {*have, *others[:SNAPSHOT_KEEPERS]})

    # Instructions.

    def _ask(self, to: str, question: Question, done: Callable[..., object], *args: Any) -> None:
        self._to_do.append(Ask(to, question, partial(self._resume, done, *args)))

    def _after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self._to_do.append(After(seconds, partial(self._resume, act, *args)))

    def _resume(self, act: Callable[..., object], *args: Any) -> None:
        """Go on with an answer, or after a while, if this worker still supervises then."""
        if not self.is_retired:
            act(*args)
