"""One schedule of supervision: workers make objects, lose and meet each other, die, and their users
kill objects, at moments drawn from a seed.

The rules are `farcall.protocol.supervision`'s and `succession`'s, as `supervision/` runs them, and
the states are those that travel. The promises:

SUP-5 In the end, when all workers that live have met again: all that know the supervision know the
      same of it, or that it is over; unless it is, one of them supervises; each child runs, and
      there is no other object. No worker makes an object of an earlier term than that of the state
      that it knows.
SUP-6 No supervisor takes over, or makes a child from, a snapshot of an earlier term than one that
      it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from farcall.protocol.succession import Edition, Keeper, Term, successor
from farcall.protocol.supervision import Strategy
from farcall.supervision.plans import Answer, State, is_usable
from simulator.schedule import Result, Schedule, Script
from simulator.supervision.leading import KEY, Plan, SimLeader
from simulator.supervision.planted import SupervisionBug, editions_of, snapshots_of
from simulator.supervision.world import Group, Member, Ref, Unreachable

MAX_EVENTS = 20_000
TROUBLE = 10.0  # seconds in which links break and workers die
QUIET = 20.0  # when the last snapshot is taken


def simulate_supervision(
    seed: int, *, bug: SupervisionBug | None = None, script: Script | None = None
) -> Result:
    """Run one schedule.

    Args:
        seed: equal arguments give equal results.
        bug: a mistake to plant in the rules, to see it found.
        script: see `Schedule`. The inputs are broken links, deaths, and objects that are killed.
    """
    return _SupervisionSchedule(seed, bug, script).run()


class _SupervisionSchedule(Schedule):
    def __init__(self, seed: int, bug: SupervisionBug | None, script: Script | None) -> None:
        super().__init__(seed, script)
        random = self._random
        size = random.choice((2, 3, 4, 4, 5))
        slowest = random.choice((0.001, 0.1, 1.0))
        members = [Member(n, editions_of(bug), snapshots_of(bug)) for n in range(size)]
        self.group = Group(members, self._clock, random, slowest, self._look_soon, self._note)
        self._members = members
        count = random.choice((1, 1, 2, 3))
        self.plan = Plan(
            targets=tuple(f"w{random.randrange(size)}" for _ in range(count)),
            strategy=random.choice(list(Strategy)),
            restarts=random.choice((1, 3, 1000, 1000)),
            per=60.0,
            every=random.choice((0.0, 0.5, 1.0, 3.0)),
        )
        self.takes_snapshots = True
        self._failures = random.choice((0.0, 0.0, 0.1))
        self._objects: dict[int, tuple[Member, int, Edition]] = {}  # that are there
        self._killed: set[tuple[int, Edition]] = set()
        self._count = 0
        self._draw()

    @property
    def now(self) -> float:
        return self._clock.now

    # What befalls them.

    def _draw(self) -> None:
        random = self._random
        agenda, members = self.group.agenda, self._members
        agenda.at(0.0, members[0], partial(self._begin, members[0]))
        end = random.choice((0.5, 3.0, TROUBLE))
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            self._input(random.uniform(0.0, end), self._split)
        for _ in range(random.choice((0, 0, 1, 5))):
            self._input(random.uniform(0.0, end), self._break)
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            self._input(random.uniform(0.0, end), self._die)
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            self._input(random.uniform(0.0, end), self._kill)
        agenda.at(QUIET, Member(-1, editions_of(None), snapshots_of(None)), self._take_no_more)

    def _input(self, moment: float, act: Any) -> None:
        if self._happens():
            nobody = Member(-1, editions_of(None), snapshots_of(None))
            self.group.agenda.at(moment, nobody, partial(self._perform, self._inputs, act))

    def _take_no_more(self) -> None:
        self.takes_snapshots = False

    def _split(self) -> None:
        """Part the group into halves, link by link, that meet again link by link."""
        random = self._random
        half = {member.number for member in self._members if random.random() < 0.5}
        pairs = [
            frozenset((one.number, other.number))
            for one in self._members
            for other in self._members
            if one.number in half and other.number not in half
        ]
        slowly, seconds = random.choice((0.0, 0.1, 1.0)), random.choice((0.1, 1.0, 5.0))
        for pair in pairs:
            end = self._members[min(pair)]
            cut = self.now + slowly * random.random()
            self.group.agenda.at(cut, end, partial(self.group.cut, pair, is_blocked=True))
            healed = cut + seconds + slowly * random.random()
            self.group.agenda.at(healed, end, partial(self.group.unblock, pair))

    def _break(self) -> None:
        pair = frozenset(self._random.sample(range(len(self._members)), 2))
        self.group.cut(pair, is_blocked=False)

    def _die(self) -> None:
        member = self._random.choice(self._members)
        if member.alive:
            self.group.die(member)
            self._objects = {n: at for n, at in self._objects.items() if at[0] is not member}

    def _kill(self) -> None:
        """Have a user kill an object."""
        if not self._objects:
            return
        number = self._random.choice(sorted(self._objects))
        owner, child, edition = self._objects.pop(number)
        self._note(owner, "has its object killed:", child, edition)
        owner.editions.killed(number)
        self._killed.add((child, edition))
        for _, keeper in owner.heard.keepers if owner.heard is not None else ():
            serve = partial(self._hear_of_kill, child=child, edition=edition)
            self.group.call(owner, keeper, serve)

    def _play(self) -> None:
        self._note("supervises", *self.plan)
        for member, act in islice(self.group.agenda, MAX_EVENTS):
            if member.alive:
                act()
            if self._violations:
                return
        if self.group.agenda:
            self._violate("ERROR", "it does not come to rest")
        else:
            self._check_end()

    # What workers do, as `Supervisors` does it.

    def _begin(self, member: Member) -> None:
        first = Edition(1, -member.number, 1)
        children = tuple(("waiting", first, "", None) for _ in self.plan.targets)
        names = tuple(f"c{n}" for n in range(len(children)))
        state = State.of((KEY, names, 1, member.number, 0, (member.keeper,), (), "", children))
        self.hear(member, state, can_lead=True)
        member.leader = SimLeader(self, member, state, self.now, is_first=True)
        member.leader.look()

    def hear(
        self, member: Member, state: State, *, can_lead: bool = False, passes_on: bool = False
    ) -> Answer:
        """Hear how the supervision is."""
        before = member.heard
        if before is None or state.order > before.order:
            counts, member.heard_at = state, self.now
        else:
            counts = before.plus(state) if state.order == before.order else before
        member.heard = counts
        member.can_lead = (member.can_lead or can_lead) and not counts.is_over
        self._end(member, member.editions.drop_outdated(counts))
        if counts.is_over:
            member.snapshots.discard(KEY)
            member.best.clear()
            if before is None or not before.is_over:
                act = partial(self._pass_on, member, counts, to_keepers=passes_on)
                self.group.soon(member, act)
        self._look_soon(member)
        if counts.order > state.order:
            return Answer(other=counts)
        return Answer(missing=tuple(member.editions.missing(counts, str(member))))

    def _end(self, member: Member, outdated: list[int]) -> None:
        for number in outdated:
            found = self._objects.pop(number, None)
            if found is not None:
                self._note(member, "drops", *found[1:])

    def _look_soon(self, member: Member) -> None:
        self.group.soon(member, partial(self._look, member))

    def _look(self, member: Member) -> None:
        state = member.heard
        if state is None:
            return
        there = [(n, (f"w{n}", n)) for n, at in member.meetings.items() if at is not None]
        there.append((member.number, member.keeper))
        first = successor(state.keepers, member.is_alive, there)
        if not member.can_lead or first[1] != member.number:
            self._retire(member)
        elif member.leader is None or member.leader.state.term != state.term:
            self._retire(member)
            self._note(member, "supervises from epoch", state.epoch + 1)
            member.leader = SimLeader(self, member, state, member.heard_at, is_first=False)
        self._exchange(member, state)
        if member.leader is not None:
            member.leader.look()
        else:
            self._ask_owners(member, state)
            self._consult(member, state, first)

    @staticmethod
    def _retire(member: Member) -> None:
        if member.leader is not None:
            member.leader.is_retired = True
            member.leader = None

    def _ask_owners(self, member: Member, state: State) -> None:
        for number, child in enumerate(state.children):
            owner = int(child.owner[1:] or -1)
            is_void = child.is_running and not (child.rref and is_usable(child.rref))
            meeting = member.meetings.get(owner)
            if not is_void or meeting is None:
                member.asked.pop(number, None)
            elif member.asked.get(number) != meeting:
                member.asked[number] = meeting
                self._ask(member, owner, self._state_of, member.take)

    def _consult(self, member: Member, state: State, first: Keeper) -> None:
        at = state.term, first
        if state.is_over or first == state.keepers[0] or member.consulted == at:
            return
        member.consulted = at
        for number, meeting in member.meetings.items():
            if meeting is not None and number == first[1]:
                self._ask(member, number, self._state_of, member.take)
                bare = partial(self._tell_barely, member, number, state)
                self._tell_successor(member, number, state.plain(), bare)

    def _tell_barely(self, member: Member, to: int, state: State, answer: object) -> None:
        if isinstance(answer, Unreachable):
            self._tell_successor(member, to, state.plain(is_bare=True), lambda _: None)

    def _tell_successor(
        self, member: Member, to: int, plain: Any, done: Callable[[Any], None]
    ) -> None:
        serve = partial(self.heard, plain=plain)
        if member.can_lead:
            serve = partial(self.adopt, plain=plain, keeper=self.group.members[to].keeper)
        self.group.call(member, to, serve, done)

    def _exchange(self, member: Member, state: State) -> None:
        for number, meeting in member.meetings.items():
            if meeting and member.met.get(number) != meeting:
                member.met[number] = meeting
                serve = partial(self.heard, plain=state.plain(is_bare=True), passes_on=True)
                self._ask(member, number, serve, lambda answer: Answer.of(answer).other)

    def _pass_on(self, member: Member, state: State, *, to_keepers: bool) -> None:
        keepers = {number for _, number in state.keepers}
        for number, meeting in member.meetings.items():
            is_told = number in keepers and not to_keepers
            if meeting is not None and not is_told and state.leader_id != member.number:
                serve = partial(self.heard, plain=state.plain(), passes_on=to_keepers)
                self.group.call(member, number, serve)

    def _ask(self, member: Member, to: int, serve: Any, read: Any) -> None:
        def answered(answer: Any) -> None:
            try:
                if answer is not None and not isinstance(answer, Unreachable):
                    state = read(answer)
                    if state is not None:
                        self.hear(member, state, passes_on=True)
            except Unreachable:
                pass

        self.group.call(member, to, serve, answered)

    # What runs on other workers, as `handlers` has it.

    def _state_of(self, member: Member) -> Any:
        return None if member.heard is None else member.heard.plain()

    def heard(self, member: Member, plain: Any, passes_on: bool = False) -> Any:
        """`handlers.hear`."""
        return self.hear(member, member.take(plain), passes_on=passes_on).plain()

    def adopt(self, member: Member, plain: Any, keeper: Any) -> Any:
        """`handlers.adopt`."""
        state = member.take(plain)
        keepers = dict.fromkeys([*state.keepers, keeper])
        return self.hear(member, state._replace(keepers=tuple(keepers)), can_lead=True).plain()

    def _hear_of_kill(self, member: Member, child: int, edition: Edition) -> None:
        if member.leader is not None:
            member.leader.ended(child, edition)

    def make(self, member: Member, leader: SimLeader, at: Any, plain: Any, saved: Any) -> Any:
        """`handlers.make`."""
        child, edition = at
        self.hear(member, member.take(plain))
        assert member.heard is not None
        self._count += 1
        number = self._count
        counts, outdated = member.editions.make(child, edition, number, member.heard)
        self._end(member, outdated)
        if counts and edition.term < member.heard.term:
            self._violate("SUP-5", f"{member} makes {edition}, and knows {member.heard}")
        if not counts or self._random.random() < self._failures:
            self._note(member, "does not make", child, edition)
            raise Unreachable("it could not be made")
        self._note(member, "makes", child, edition, "number", number, "from", saved)
        self._objects[number] = (member, child, edition)
        return Ref(member, member.number, 0, number)

    def save(self, member: Member, number: int) -> int:
        """`handlers.save`."""
        if number not in self._objects:
            raise Unreachable("the object was dropped")
        return number

    def keep(self, member: Member, child: int, number: Any, snapshot: int) -> None:
        """`handlers.keep`."""
        term = number[:2]
        member.best[child] = max(member.best.get(child, term), term)
        member.snapshots.put(KEY, child, number, snapshot)

    # Promises.

    def takes_over(self, member: Member, term: Term) -> None:
        """Note that a worker supervises: the snapshots that it has count from now on."""
        for child in member.best:
            member.best[child] = term

    def restores(self, member: Member, child: int, saved: Any) -> None:
        """Check the snapshot, if any, that a supervisor takes over or has a child made from."""
        best = member.best.get(child)
        if best is not None and (saved is None or saved[0][:2] < best):
            self._violate("SUP-6", f"{member} restores {child} from {saved}, and was given {best}")

    def _check_end(self) -> None:
        live = [member for member in self._members if member.alive]
        known = [(member, member.heard) for member in live if member.heard is not None]
        if not known:
            return
        best = max((heard for _, heard in known), key=lambda state: state.order)
        if not best.is_over and not live[0].can_lead:
            return  # the supervisor died before that one was asked to be a keeper
        for member, heard in known:
            is_over_too = best.is_over and heard.is_over  # each half for itself
            if heard.order != best.order and not is_over_too:
                self._violate("SUP-5", f"{member} knows {heard}, and not {best}")
        leaders = [str(member) for member in live if member.leader is not None]
        if len(leaders) != (not best.is_over):
            self._violate("SUP-5", f"these supervise in the end: {leaders}, {best}")
        wanted = set()
        for number, child in enumerate(best.children):
            if best.is_over or child.has_ended:
                continue
            if not child.is_running:
                self._violate("SUP-5", f"c{number} does not run in the end: {best}")
            elif (number, child.edition) not in self._killed:
                wanted.add((child.owner, number, child.edition))
        there = {(str(owner), *which) for owner, *which in self._objects.values()}
        if there != wanted or len(there) != len(self._objects):
            self._violate("SUP-5", f"there are {there} in the end, and not {wanted}")
