"""Workers of a group, and links between them that break and are made again, on a virtual clock.

Both ends notice that a link is broken, each when it will. Each time that two workers meet is a
*meeting* of its own; a message belongs to one, and a reference is of no use after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

from farcall.protocol.knowledge import Knowledge
from farcall.protocol.leading import Leading
from farcall.protocol.standing import ChildState, SupervisionState, Term
from farcall.protocol.succession import Editions, KeptSnapshots
from farcall.protocol.supervision_instructions import Present
from farcall.testing.clock import ManualClock
from simulator.agenda import Agenda


class Unreachable(Exception):
    """A worker was lost, or a reference can't be taken since its owner has not been met."""


class Unwilling(Exception):
    """A worker can't do what it is asked for, however often it is asked."""


class Ref(NamedTuple):
    """A reference as a worker has it."""

    holder: Member
    owner: int
    meeting: int
    number: int  # of the object

    def taken_by(self, receiver: Member) -> Ref:
        """Return the reference as it arrives."""
        meeting = receiver.meetings.get(self.owner, 0)
        if meeting is None:
            raise Unreachable(f"w{self.owner} has not been met")
        return Ref(receiver, self.owner, meeting, self.number)


Done = Callable[[object], None]  # takes the answer, or an Unreachable or Unwilling
AGAIN = 1000  # what a meeting adds to the number of a worker: its incarnation is another one then


@dataclass(eq=False)
class Member:
    """A worker, and its `Surroundings`.

    Attributes:
        role: of it.
        is_able: it can keep the plan of a supervision.
        is_willing: its policy lets it take part at all.
        is_open: workers may come, as it believes.
        meetings: the present meeting with each other worker; None: that one is lost.
        roles: of all workers.
        calls: that have no answer yet: to whom, and the function that takes it.
        best: the latest term of a snapshot that it was given, by child.
        knowledge: of the supervision.
        leading: as it supervised last.
        has_heard_end: it knew once that the supervision is over, and has dropped the plan for that.
    """

    number: int
    clock: ManualClock
    editions: Editions[int]
    snapshots: KeptSnapshots[int]  # each is the number of the object that it is of
    role: str = ""
    is_able: bool = True
    is_willing: bool = True
    is_open: bool = False
    meetings: dict[int, int | None] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    calls: dict[int, tuple[int, Done]] = field(default_factory=dict)
    best: dict[int, Term] = field(default_factory=dict)
    knowledge: Knowledge | None = None
    leading: Leading | None = None
    has_heard_end: bool = False
    alive: bool = True
    stands_until: float = 0.0

    def __str__(self) -> str:
        return f"w{self.number}"

    @property
    def has_plan(self) -> bool:
        return self.knowledge is not None and self.knowledge.plan is not None

    @property
    def me(self) -> Present:
        return Present(str(self), self.number, self.role, self.number, self.number)

    def now(self) -> float:
        return self.clock.now

    def others(self) -> list[Present]:
        met = ((n, meeting) for n, meeting in sorted(self.meetings.items()) if meeting is not None)
        return [Present(f"w{n}", n, self.roles[n], n, n + AGAIN * meeting) for n, meeting in met]

    def is_usable(self, ref: Ref) -> bool:
        return ref.owner == self.number or self.meetings[ref.owner] == ref.meeting

    def may_come(self, name: str) -> bool:
        return self.is_open

    def reaches(self, number: int) -> bool:
        return number == self.number or self.meetings[number] is not None

    def take(self, plain: tuple[Any, ...]) -> SupervisionState:
        """Return a state as it arrives here."""
        state = SupervisionState.of(plain)
        return state._replace(children=tuple(map(self._take_child, state.children)))

    def _take_child(self, child: ChildState) -> ChildState:
        rref: Any = child.rref
        return child if rref is None else child._replace(rref=rref.taken_by(self))


@dataclass
class Link:
    """A link: how often it was made, whether it is cut, and which ends are unaware of that."""

    meeting: int = 0
    is_cut: bool = False
    unaware: set[int] = field(default_factory=set)
    is_blocked: bool = False


class Group:
    """The workers, and the links between them.

    Args:
        slowest: seconds that a message may take, and a look at the group.
        look: called when a worker has lost or met another one.
    """

    def __init__(
        self,
        members: Iterable[Member],
        clock: ManualClock,
        random: Random,
        slowest: float,
        look: Callable[[Member], None],
        note: Callable[..., None],
    ) -> None:
        self.members = {member.number: member for member in members}
        self.agenda: Agenda[Member] = Agenda(clock, random, slowest)
        self._clock = clock
        self._random = random
        self._slowest = slowest
        self._look = look
        self._note = note
        self._calls = 0
        self._links: dict[frozenset[int], Link] = {}
        for member in self.members.values():
            for other in self.members:
                member.roles[other] = self.members[other].role
                if other != member.number:
                    member.meetings[other] = 0
                    self._links[frozenset((member.number, other))] = Link()

    def soon(self, member: Member, act: Callable[[], None]) -> None:
        """Have a worker do something within a moment."""
        delay = self._random.choice((0.0, 0.001, self._slowest)) * self._random.random()
        self.agenda.at(self._clock.now + delay, member, act)

    # Calls.

    def call(
        self, caller: Member, to: int, serve: Callable[[Member], object], done: Done | None = None
    ) -> None:
        """Call a function of another worker, or of the caller itself."""
        meeting = caller.meetings.get(to, 0)
        self._calls += 1
        number = self._calls
        caller.calls[number] = (to, done or (lambda _: None))
        if meeting is None:
            self.soon(caller, partial(self._answered, caller, number, Unreachable("was lost")))
            return
        arrive = partial(self._serve, caller, self.members[to], meeting, serve, number)
        self.agenda.send(caller.number, self.members[to], arrive)

    def _is_through(self, one: Member, other: Member, meeting: int) -> bool:
        if one is other:
            return True
        link = self._links[frozenset((one.number, other.number))]
        views = one.meetings[other.number], other.meetings[one.number]
        return not link.is_cut and views == (meeting, meeting)

    def _serve(
        self,
        caller: Member,
        callee: Member,
        meeting: int,
        serve: Callable[[Member], object],
        number: int,
    ) -> None:
        if not self._is_through(caller, callee, meeting):
            return
        try:
            answer = serve(callee)
        except (Unreachable, Unwilling) as error:
            answer = error
        act = partial(self._arrive, caller, callee, meeting, number, answer)
        self.agenda.send(callee.number, caller, act)

    def _arrive(
        self, caller: Member, callee: Member, meeting: int, number: int, answer: object
    ) -> None:
        if self._is_through(caller, callee, meeting):
            self._answered(caller, number, answer)

    def _answered(self, caller: Member, number: int, answer: object) -> None:
        call = caller.calls.pop(number, None)
        if call is not None:
            call[1](answer)

    # Links.

    def cut(self, pair: frozenset[int], *, is_blocked: bool) -> None:
        """Break a link.

        Args:
            is_blocked: until `unblock`; else it is made again as soon as both have noticed.
        """
        link = self._links[pair]
        link.is_blocked = is_blocked
        ends = [self.members[number] for number in sorted(pair)]
        if link.is_cut or not all(end.alive for end in ends):
            return
        self._note("the link of", *ends, "breaks")
        link.is_cut, link.unaware = True, set(pair)
        for end, other in (ends, ends[::-1]):
            self.soon(end, partial(self._notice, link, end, other))

    def unblock(self, pair: frozenset[int]) -> None:
        """Let a link be made again."""
        self._links[pair].is_blocked = False
        self._meet(self._links[pair], pair)

    def _notice(self, link: Link, end: Member, other: Member) -> None:
        self._note(end, "loses", other)
        link.unaware.discard(end.number)
        end.meetings[other.number] = None
        for number, (to, _) in list(end.calls.items()):
            if to == other.number:
                self._answered(end, number, Unreachable("was lost"))
        self._look(end)
        self._meet(link, frozenset((end.number, other.number)))

    def _meet(self, link: Link, pair: frozenset[int]) -> None:
        ends = [self.members[number] for number in sorted(pair)]
        is_there = all(end.alive for end in ends)
        if link.is_cut and not link.unaware and not link.is_blocked and is_there:
            link.meeting += 1
            link.is_cut = False
            self._note(*ends, "meet again")
            for end, other in (ends, ends[::-1]):
                end.meetings[other.number] = link.meeting
                self._look(end)

    def die(self, member: Member) -> None:
        """End a worker."""
        self._note(member, "dies")
        pairs = [pair for pair in self._links if member.number in pair]
        for pair in pairs:
            self.cut(pair, is_blocked=False)
        member.alive = False
