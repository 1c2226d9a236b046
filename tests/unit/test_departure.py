"""Leaving together, in any order of events and with any deaths.

DEP-1: nobody is dismissed while a live worker is not ready, is busy, or a call is under way.
DEP-2: when all the living are ready and nothing is in flight any more, everybody is dismissed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from farcall.protocol.departure import Departure, Messages
from farcall.wire import Dismiss, Drain, Drained


class Call:
    """Work under way to a worker. `alive`: on behalf of a caller that lives."""

    def __init__(self, caller: Member) -> None:
        self.caller = caller


class Loss:
    """The end of a link: the last that comes from a dead worker."""


@dataclass
class Member:
    """A worker as `Leaver` runs it: counts calls, and tells its `Departure`."""

    number: int
    departure: Departure
    alive: bool = True
    wants_to_leave: bool = False
    noticed: set[int] = field(default_factory=set)
    serving: list[Call] = field(default_factory=list)
    own: int = 0  # calls of its own without an outcome
    epoch: int = 0

    @property
    def active(self) -> int:
        return self.own + len(self.serving)

    @property
    def in_group(self) -> bool:
        return self.alive and not self.departure.dismissed


class Group:
    """Members, and what travels between each two of them, in order."""

    def __init__(self, size: int, seed: int) -> None:
        self.draw = random.Random(seed)
        members = [(rank, 100 + rank) for rank in range(size)]
        self.members = {
            number: Member(number, Departure(number, list(members))) for _, number in members
        }
        self.links: dict[tuple[int, int], deque[object]] = {
            (one, other): deque() for one in self.members for other in self.members
        }
        self.steps = 0

    # What members do.

    def post(self, sender: Member, messages: Messages) -> None:
        for to, message in messages:
            self.links[sender.number, to].append(message)

    def begin(self, member: Member) -> None:
        if member.active == 1:
            member.epoch += 1
            if member.wants_to_leave:
                member.departure.busy()

    def end(self, member: Member) -> None:
        if not member.active and member.wants_to_leave:
            self.post(member, member.departure.idle(member.epoch))
        self.check(member)

    def call(self, member: Member, other: Member) -> None:
        if other.number in member.noticed:
            return
        member.own += 1
        self.begin(member)
        self.links[member.number, other.number].append(Call(member))

    def leave(self, member: Member) -> None:
        member.wants_to_leave = True
        if not member.active:
            self.post(member, member.departure.idle(member.epoch))
        self.post(member, member.departure.ready())
        self.check(member)

    def finish(self, member: Member) -> None:
        """A handler ends: its caller gets the answer."""
        call = member.serving.pop(self.draw.randrange(len(member.serving)))
        self.links[member.number, call.caller.number].append("answer")
        self.end(member)

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
        departure = member.departure
        if not member.in_group or sender in member.noticed:
            return
        match item:
            case Call():
                member.serving.append(item)
                self.begin(member)
            case "answer":
                member.own -= 1
                self.end(member)
            case Drain():
                self.post(member, departure.on_drain(sender, item))
            case Drained():
                self.post(member, departure.on_drained(sender, item))
            case Dismiss():
                departure.on_dismiss()
            case Loss():
                self.notice(member, sender)
        self.check(member)

    def notice(self, member: Member, dead: int) -> None:
        member.noticed.add(dead)
        self.post(member, member.departure.lost(dead))
        # Calls to the dead end now; those that it made run on, but nobody gets the answer.
        lost = self.in_flight(member.number, dead)
        member.own -= lost
        if lost:
            self.end(member)

    def in_flight(self, caller: int, dead: int) -> int:
        """Calls of `caller` that the dead will never answer."""
        return self.unanswered.get((caller, dead), 0)

    # The promises.

    def check(self, member: Member) -> None:
        if not member.departure.dismissed:
            return
        for other in self.members.values():
            if other.alive:
                assert other.wants_to_leave, f"dismissed before {other.number} was ready (DEP-1)"
                assert not other.own, f"dismissed while {other.number} waits for a call (DEP-1)"
                of_the_living = [call for call in other.serving if call.caller.alive]
                assert not of_the_living, f"dismissed while {other.number} is busy (DEP-1)"
