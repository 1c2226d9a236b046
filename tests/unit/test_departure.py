"""Leaving together, in any order of events and with any deaths.

DEP-1: nobody is dismissed while a live worker is not ready, waits for a call, or serves one. What
       runs on behalf of a dead worker does not count: nobody waits for it.
DEP-2: when all the living are ready and nothing is in flight any more, everybody is dismissed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest

from farcall.protocol.departure import Departure, Messages
from farcall.wire.messages import Dismiss, Drain, Drained


class Call(NamedTuple):
    """A call on its way to, or at, its callee."""

    number: int
    chain: tuple[int, ...]  # on behalf of whom; the last one waits for the answer


class Answer(NamedTuple):
    number: int


class Loss:
    """The end of a link: the last that comes from a worker that died or left."""


@dataclass
class Member:
    """A worker as `Leaver` runs it: counts calls, and tells its `Departure`."""

    number: int
    departure: Departure
    alive: bool = True
    leaving: bool = False
    gone: set[int] = field(default_factory=set)  # whose end it has noticed
    serving: list[Call] = field(default_factory=list)
    own: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # callee, chain
    epoch: int = 0

    @property
    def active(self) -> int:
        return len(self.own) + len(self.serving)

    @property
    def takes_part(self) -> bool:
        return self.alive and not self.departure.dismissed


class Group:
    """Members, and what is on its way between each two of them, in order."""

    def __init__(self, size: int, seed: int) -> None:
        self.draw = random.Random(seed)
        numbers = [(rank, 100 + rank) for rank in range(size)]
        self.members = {n: Member(n, Departure(n, list(numbers))) for _, n in numbers}
        self.links: dict[tuple[int, int], deque[object]] = {
            (one, other): deque() for one in self.members for other in self.members
        }
        self.calls = 0

    # What members do.

    def post(self, sender: Member, messages: Messages) -> None:
        for to, message in messages:
            self.links[sender.number, to].append(message)

    def begun(self, member: Member) -> None:
        if member.leaving:
            member.epoch += 1

    def ended(self, member: Member) -> None:
        if not member.active and member.leaving and member.departure.asked:
            self.step(member, list)

    def step(self, member: Member, event: Callable[[], Messages]) -> None:
        member.departure.busy()
        messages = event()
        if not member.active:
            messages += member.departure.idle(member.epoch)
        self.post(member, messages)

    def call(self, member: Member, to: int, chain: tuple[int, ...] = ()) -> None:
        if to in member.gone:
            return
        self.calls += 1
        chain = (*chain, member.number)
        member.own[self.calls] = (to, chain)
        self.begun(member)
        self.links[member.number, to].append(Call(self.calls, chain))

    def finish(self, member: Member) -> None:
        call = member.serving.pop(self.draw.randrange(len(member.serving)))
        self.links[member.number, call.chain[-1]].append(Answer(call.number))
        self.ended(member)

    def leave(self, member: Member) -> None:
        member.leaving = True
        self.step(member, member.departure.ready)

    def die(self, member: Member) -> None:
        member.alive = False
        for (sender, to), link in self.links.items():
            if sender == member.number:
                # Some of what it wrote never left its machine.
                for _ in range(self.draw.randint(0, len(link))):
                    link.pop()
                link.append(Loss())
            elif to == member.number:
                link.clear()

    def deliver(self, sender: int, to: int) -> None:
        member, item = self.members[to], self.links[sender, to].popleft()
        if not member.takes_part or sender in member.gone:
            return
        departure = member.departure
        match item:
            case Call():
                member.serving.append(item)
                self.begun(member)
            case Answer(number):
                if member.own.pop(number, None):
                    self.ended(member)
            case Drain():
                self.step(member, partial(departure.on_drain, sender, item))
            case Drained():
                self.step(member, partial(departure.on_drained, sender, item))
            case Dismiss():
                departure.on_dismiss()
            case Loss():
                self.notice(member, sender)
        if departure.dismissed:
            self.check_dismissal()
            for other in self.members:
                self.links[member.number, other].append(Loss())

    def notice(self, member: Member, gone: int) -> None:
        member.gone.add(gone)
        ended = [number for number, (callee, _) in member.own.items() if callee == gone]
        for number in ended:
            del member.own[number]
        if ended:
            self.ended(member)
        self.step(member, partial(member.departure.lost, gone))

    # What is promised.

    def check_dismissal(self) -> None:
        for member in filter(lambda m: m.alive, self.members.values()):
            assert member.leaving, f"DEP-1: {member.number} is not ready"
            chains = [call.chain for call in member.serving] + [c for _, c in member.own.values()]
            for chain in chains:
                assert not all(self.members[n].alive for n in chain), f"DEP-1: {member} is busy"

    # Schedules.

    def act(self, deaths: bool) -> None:
        """One random thing happens."""
        member = self.members[self.draw.choice(list(self.members))]
        other = self.draw.choice(list(self.members))
        what = self.draw.random()
        if what < 0.5:
            waiting = [ends for ends, link in self.links.items() if link]
            if waiting:
                self.deliver(*self.draw.choice(waiting))
        elif not member.takes_part:
            return
        elif what < 0.6 and not member.leaving:
            self.call(member, other)
        elif what < 0.7 and member.serving:
            self.call(member, other, self.draw.choice(member.serving).chain)  # a nested call
        elif what < 0.85 and member.serving:
            self.finish(member)
        elif what < 0.95 and not member.leaving and self.draw.random() < 0.3:
            self.leave(member)
        elif deaths and self.draw.random() < 0.05:
            self.die(member)

    def settle(self) -> None:
        """Everybody becomes ready, everything arrives, every handler ends."""
        for member in self.members.values():
            if member.takes_part and not member.leaving:
                self.leave(member)
        while True:
            waiting = [ends for ends, link in self.links.items() if link]
            busy = [m for m in self.members.values() if m.takes_part and m.serving]
            if not waiting and not busy:
                return
            if waiting and (not busy or self.draw.random() < 0.7):
                self.deliver(*self.draw.choice(waiting))
            else:
                self.finish(self.draw.choice(busy))

    def stuck(self) -> list[Member]:
        return [m for m in self.members.values() if m.takes_part]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("deaths", [False, True], ids=["no deaths", "deaths"])
def test_all_the_living_are_dismissed_and_nobody_before_all_are_idle(
    size: int, deaths: bool
) -> None:
    for seed in range(1500):
        group = Group(size, seed)
        for _ in range(group.draw.randrange(10, 150)):
            group.act(deaths)
        group.settle()
        assert not group.stuck(), f"DEP-2: seed {seed}"


def test_schedules_reach_what_they_are_for() -> None:
    """Deaths of leaders, work on behalf of the dead, calls under way while everybody leaves."""
    dead_leaders = busy_leavers = orphans = 0
    for seed in range(300):
        group = Group(3, seed)
        for _ in range(100):
            group.act(deaths=True)
            members = group.members.values()
            busy_leavers += any(m.leaving and m.serving for m in members)
            orphans += any(not group.members[c.chain[0]].alive for m in members for c in m.serving)
        dead_leaders += not group.members[100].alive
    assert min(dead_leaders, busy_leavers, orphans) > 20


# Single steps, as the schedules would find them too.

ONE, TWO, THREE = (0, 11), (1, 22), (2, 33)


def leaving(me: tuple[int, int], *members: tuple[int, int]) -> Departure:
    departure = Departure(me[1], list(members))
    departure.idle(1)
    return departure


def test_live_worker_with_the_lowest_id_leads() -> None:
    departure = Departure(22, [THREE, TWO, ONE])
    assert departure.leader == 11
    departure.lost(11)
    assert departure.leader == 22


def test_two_equal_rounds_are_needed() -> None:
    leader = leaving(ONE, ONE, TWO)
    assert leader.ready() == [(11, Drain(1)), (22, Drain(1))]
    assert leader.missing == [11, 22]
    leader.on_drained(11, Drained(1, 1))
    second = leader.on_drained(22, Drained(1, 4))
    assert second == [(11, Drain(2)), (22, Drain(2))]
    leader.on_drained(11, Drained(2, 1))
    third = leader.on_drained(22, Drained(2, 5))  # it was active in between
    assert third == [(11, Drain(3)), (22, Drain(3))]
    leader.on_drained(11, Drained(3, 1))
    assert not leader.dismissed
    assert leader.on_drained(22, Drained(3, 5)) == [(22, Dismiss())]
    assert leader.dismissed


def test_answer_waits_for_readiness_and_idleness() -> None:
    departure = Departure(22, [ONE, TWO])
    assert departure.on_drain(11, Drain(1)) == []
    assert departure.ready() == []
    assert departure.idle(3) == [(11, Drained(1, 3))]
    departure.busy()
    assert departure.on_drain(11, Drain(2)) == []
    assert departure.idle(4) == [(11, Drained(2, 4))]


def test_answers_to_old_rounds_are_ignored() -> None:
    leader = leaving(ONE, ONE, TWO)
    leader.ready()
    assert leader.on_drained(22, Drained(7, 1)) == []
    assert leader.missing == [11, 22]


def test_late_question_of_a_dead_leader_does_not_push_out_its_successors() -> None:
    departure = Departure(33, [ONE, TWO, THREE])
    departure.ready()
    departure.on_drain(22, Drain(1))  # it has noticed the death of 11
    departure.on_drain(11, Drain(1))  # its last words, read after
    assert (22, Drained(1, 1)) in departure.idle(1)


def test_successor_asks_everybody_again() -> None:
    second = leaving(TWO, ONE, TWO, THREE)
    assert second.ready() == []
    assert second.lost(11) == [(22, Drain(1)), (33, Drain(1))]


def test_last_one_dismisses_itself() -> None:
    last = leaving(ONE, ONE, TWO)
    last.ready()
    last.on_drained(11, Drained(1, 1))
    assert last.lost(22) == [(11, Drain(2))]
    assert last.on_drained(11, Drained(2, 1)) == []
    assert last.dismissed
