"""One schedule of supervision: workers make objects, lose and meet each other, die, and their users
kill objects, at moments drawn from a seed.

The machines are `farcall.protocol`'s `knowledge`, `leading`, `succession` and `supervision`, and
the states are those that travel. The promises:

SUP-5 In the end, when all workers that live have met again: all that know the supervision know the
      same of it, or that it is over; unless it is, one of them supervises; each child runs, and
      there is no other object. No worker makes an object of an earlier term than that of the state
      that it knows.
SUP-6 No worker keeps, and no supervisor makes a child from, a snapshot of an earlier term than one
      that it was given.
SUP-7 Once `supervise` has returned, in a group of more than one worker that could take over, the
      objects are made again when the supervisor dies.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from farcall.protocol.supervision import Strategy, Target
from farcall.protocol.supervision_instructions import SupervisionPlan
from simulator.schedule import Result, Schedule, Script
from simulator.supervision.planted import (
    SupervisionBug,
    editions_of,
    knowledge_type_of,
    snapshots_of,
)
from simulator.supervision.working import Workers
from simulator.supervision.world import Group, Member

MAX_EVENTS = 20_000
TROUBLE = 10.0  # seconds in which links break and workers die
QUIET = 8.0  # seconds from the last trouble to the last snapshot


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
        is_open = random.random() < 0.2
        has_roles = random.random() < 0.2
        unable = random.choice((1, 1, size - 1)) if random.random() < 0.2 else None
        is_willing = random.random() < 0.7
        self._nobody = Member(-1, self._clock, editions_of(None), snapshots_of(None))
        self._members = [
            Member(
                n,
                self._clock,
                editions_of(bug),
                snapshots_of(bug),
                role="ab"[n % 2] if has_roles else "",
                is_able=n != unable,
                is_willing=n != unable or is_willing,
                is_open=is_open,
            )
            for n in range(size)
        ]
        self.group = Group(self._members, self._clock, random, slowest, self._look_soon, self._note)
        # Each attempt fails at once if none is left of a role, or one that is chosen refuses.
        many = 3 if has_roles or not is_willing else 1000
        wanted = [random.choice(self._members) for _ in range(random.choice((1, 1, 2, 3)))]
        every = random.choice((0.0, 0.5, 1.0, 3.0))
        self._plan = SupervisionPlan(
            recipe=None,
            targets=[Target(str(one) if random.random() < 0.7 else "", one.role) for one in wanted],
            every=[every] * len(wanted),
            strategy=random.choice(list(Strategy)),
            restarts=random.choice((1, 3, many, many)),
            per=60.0,
            wait=random.choice((0.0, 2.0)),
        )
        self._workers = Workers(
            self.group,
            self._plan,
            knowledge_type_of(bug),
            random,
            random.choice((0.0, 0.0, 0.1)),
            self._note,
            self._violate,
            self._started,
        )
        self._killed: set[tuple[int, Any]] = set()
        self._heirs: list[Member] = []  # that could take over when it started
        self._draw(5 * slowest * random.choice((0, 1, 1)))

    # Events.

    def _draw(self, calm: float) -> None:
        """Draw what happens.

        Args:
            calm: seconds in which nothing goes wrong.
        """
        random = self._random
        agenda, first = self.group.agenda, self._members[0]
        agenda.at(0.0, first, partial(self._workers.begin, first))
        end = calm + random.choice((0.5, 3.0, TROUBLE))
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            self._input(random.uniform(calm, end), self._split)
        for _ in range(random.choice((0, 0, 1, 5))):
            self._input(random.uniform(calm, end), self._break)
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            self._input(random.uniform(calm, end), self._die)
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            self._input(random.uniform(calm, end), self._kill)
        if random.random() < 0.1:
            self._input(random.uniform(0.0, 0.5 + calm), partial(self._end, first))
        dies_at_start = random.random() < 0.2
        self._dies_at_start = self._inputs if self._happens() and dies_at_start else 0
        if random.random() < 0.1:  # its user waits no longer
            self._input(random.uniform(0.0, end), self._give_up)
        agenda.at(end + QUIET, self._nobody, self._take_no_more)

    def _input(self, moment: float, act: Any) -> None:
        if self._happens():
            act = partial(self._perform, self._inputs, act)
            self.group.agenda.at(moment, self._nobody, act)

    def _take_no_more(self) -> None:
        self._workers.takes_snapshots = False

    def _look_soon(self, member: Member) -> None:
        self._workers.look_soon(member)

    def _started(self, member: Member, error: Exception | None) -> None:
        """Note that `supervise` has returned: from now on its promise holds."""
        self._note(member, "has started", error or "")
        if error is not None or member.has_heard_end:  # it failed, or the user has killed all
            return
        self._heirs = [
            one
            for one in self._members
            if one is not member and one.alive and one.is_able and member.reaches(one.number)
        ]
        if self._dies_at_start:
            act = partial(self._perform, self._dies_at_start, partial(self._end, member))
            self.group.soon(self._nobody, act)

    def _give_up(self) -> None:
        self._workers.fail_start(self._members[0], TimeoutError("it took too long"))

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
            cut = self._clock.now + slowly * random.random()
            self.group.agenda.at(cut, end, partial(self.group.cut, pair, is_blocked=True))
            healed = cut + seconds + slowly * random.random()
            self.group.agenda.at(healed, end, partial(self.group.unblock, pair))

    def _break(self) -> None:
        pair = frozenset(self._random.sample(range(len(self._members)), 2))
        self.group.cut(pair, is_blocked=False)

    def _die(self) -> None:
        self._end(self._random.choice(self._members))

    def _end(self, member: Member) -> None:
        if member.alive:
            self.group.die(member)
            self._workers.end(member)

    def _kill(self) -> None:
        """Have a user kill an object."""
        objects = self._workers.objects
        if objects:
            number = self._random.choice(sorted(objects))
            owner, child, edition = objects[number]
            self._note(owner, "has its object killed:", child, edition)
            self._killed.add((child, edition))
            self._workers.kill(number)

    def _play(self) -> None:
        self._note("supervises", *self._plan)
        for member, act in islice(self.group.agenda, MAX_EVENTS):
            if member.alive:
                act()
            if self._violations:
                return
        if self.group.agenda:
            self._violate("ERROR", "it does not come to rest")
        else:
            self._check_end()

    # Promises.

    def _check_end(self) -> None:
        live = [member for member in self._members if member.alive]
        known = [(one, one.knowledge.state) for one in live if one.knowledge is not None]
        best = max((state for _, state in known), key=lambda state: state.order, default=None)
        if best is None or (not best.is_over and not any(one.has_plan for one in live)):
            keep = [one.alive and not one.has_heard_end for one in self._heirs]
            if keep and all(keep):
                self._violate("SUP-7", f"no worker has the plan in the end: {best}")
            return  # it had not started, or all that could take over have died, or given it up
        for member, state in known:
            is_over_too = best.is_over and state.is_over  # each half for itself
            if state.order != best.order and not is_over_too:
                self._violate("SUP-5", f"{member} knows {state}, and not {best}")
        leaders = [str(one) for one in live if one.knowledge and one.knowledge.leading]
        if len(leaders) != (not best.is_over):
            self._violate("SUP-5", f"these supervise in the end: {leaders}, {best}")
        wanted = set()
        for number, child in enumerate(best.children):
            if best.is_over or child.has_ended:
                continue
            if not child.is_running:
                if not self._waits(number, live):
                    self._violate("SUP-5", f"c{number} does not run in the end: {best}")
            elif (number, child.edition) not in self._killed:
                wanted.add((child.owner, number, child.edition))
        objects = self._workers.objects.values()
        there = {(str(owner), *which) for owner, *which in objects}
        if there != wanted or len(there) != len(objects):
            self._violate("SUP-5", f"there are {there} in the end, and not {wanted}")

    def _waits(self, child: int, live: list[Member]) -> bool:
        """Return whether a child, or one before it, waits for a worker of its role to come."""
        targets = self._plan.targets
        if self._plan.strategy is Strategy.ONE:
            targets = targets[child : child + 1]
        lacks = [one for one in targets if one.role not in {member.role for member in live}]
        return bool(lacks) and self._members[0].is_open
