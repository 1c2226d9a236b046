"""A worker's host and the network before it, on a virtual clock: what a dialler meets, and when.

The host's fate is drawn in advance, so the oracle knows at each moment what a dialler
can't: whether the worker is alive, and whether it could be reached.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import NamedTuple

from farcall.protocol.connecting import Address, DialFailure

SYNS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0)  # when a kernel asks for a connection, in seconds
ACCEPTOR_SECONDS = 5.0  # that the worker gives a handshake, up to the proof
CALM = 120.0  # seconds after which the host stays as it is
SECRET_KINDS = 12  # one worker in so many refuses us


class Mode(StrEnum):
    """The mode of a host for some time."""

    UP = "up"
    DARK = "dark"  # nothing comes back
    BACKLOG = "backlog full"  # nothing comes back, either
    UNREACHABLE = "unreachable"  # the network says so
    NAMELESS = "name server fails"
    GONE = "worker gone"  # the worker has ended: the host refuses
    RESTARTED = "restarted"  # another incarnation listens in its place


class Stranger(StrEnum):
    """The behaviour of another host that has an address in common with the worker's."""

    REFUSES_CONNECTIONS = "refuses connections"
    OTHER_WORKER = "is another worker"
    OTHER_SECRET = "has another secret"
    SAYS_NOTHING = "says nothing"


SILENT = (Mode.DARK, Mode.BACKLOG, Mode.UNREACHABLE, Mode.NAMELESS)
ENDS = {Mode.GONE, Mode.RESTARTED}


class Outcome(NamedTuple):
    """Of an attempt.

    Attributes:
        at: when it ends.
        failure: how; None: well.
        reached: the worker's host was there all the time, although it may have answered too late.
    """

    at: float
    failure: DialFailure | None
    reached: bool = False


class World:
    """One worker and its host.

    Args:
        random: draws what becomes of them.
        happens: whether the next change of them happens.

    Attributes:
        addresses: for the machine.
        strangers: those of the addresses that lead to another host.
        refuses: the worker wants no link with us.
        dead_after: seconds; 0: never.
    """

    def __init__(self, random: Random, happens: Callable[[], bool]) -> None:
        self._random = random
        self._happens = happens
        self.dead_after = random.choice((1.0, 3.0, 10.0, 30.0, 30.0, 0.0))
        self.refuses = random.randrange(SECRET_KINDS) == 0
        self.strangers: dict[str, Stranger] = {}
        self.addresses = self._draw_addresses()
        self._starts, self._modes = self._draw_modes()
        self._short_of_descriptors = self._draw_intervals(0.25, 40.0)
        self._flicker = random.choice((0.0, 0.0, 0.4))  # chance to be, for a moment
        # Who says that a host is dead after 3 s says that connections are quick.
        self._latency = random.choice((0.0005, 0.02, 0.3 if self.dead_after >= 10.0 else 0.04))
        self._stall_chance = random.choice((0.0, 0.1, 0.5))
        self.last_stall = -math.inf  # when the worker last stood still

    def _draw_addresses(self) -> tuple[Address, ...]:
        random = self._random
        found = [Address(f"tcp:{index}") for index in range(random.choice((1, 2, 2, 3)))]
        if len(found) > 1 and random.random() < 0.7:
            self.strangers[random.choice(found).url] = random.choice(
                (*Stranger, Stranger.SAYS_NOTHING)
            )
        if random.random() < 0.2:
            found.insert(0, Address("unix", is_exclusive=True))
        return tuple(found)

    def _draw_modes(self) -> tuple[list[float], list[Mode]]:
        random = self._random
        starts, modes, now = [0.0], [random.choice((Mode.UP, *SILENT))], 0.0
        while modes[-1] not in ENDS:
            now += random.choice((0.05, 0.5, 3.0, 12.0, 40.0)) * (0.5 + random.random())
            if now > CALM:
                break
            if not self._happens():
                continue
            starts.append(now)
            if random.random() < 0.1:
                modes.append(Mode.GONE)
                if random.random() < 0.7:
                    starts.append(now + random.uniform(0.0, 5.0))
                    modes.append(Mode.RESTARTED)
            else:
                is_up = modes[-1] is Mode.UP
                modes.append(random.choice(SILENT) if is_up else Mode.UP)
        return starts, modes

    def _draw_intervals(self, chance: float, longest: float) -> list[tuple[float, float]]:
        random, now, found = self._random, 0.0, []
        while random.random() < chance and now < CALM:
            now += random.uniform(0.0, 40.0)
            end = now + random.uniform(0.1, longest)
            if self._happens():
                found.append((now, end))
            now = end
        return found

    # The truth.

    def mode(self, now: float) -> Mode:
        """Return the mode of the host at a time."""
        return self._modes[bisect_right(self._starts, now) - 1]

    def is_dead(self, now: float) -> bool:
        """Return whether the worker has ended."""
        return self.mode(now) in ENDS

    def is_dark(self, now: float) -> bool:
        """Return whether no address connects. A Unix name does, unless the backlog is full."""
        return self.mode(now) in SILENT and self.addresses[0].url != "unix"

    def was_in_reach(self, since: float, until: float) -> bool:
        """Return whether nothing kept us from the worker in all of that time."""
        begins, ends = bisect_right(self._starts, since) - 1, bisect_right(self._starts, until)
        return (
            self._modes[begins:ends] == [Mode.UP]
            and self.last_stall < since
            and not any(a < until and b > since for a, b in self._short_of_descriptors)
            and not self._flicker
        )

    def is_short_of_descriptors(self, now: float) -> bool:
        """Return whether this machine can't open a socket."""
        return any(begin <= now < end for begin, end in self._short_of_descriptors)

    # Answers that a dialler gets.

    def connect(self, url: str, now: float, until: float) -> Outcome:
        """Ask for a connection."""
        if self.is_short_of_descriptors(now) or self._random.random() < self._flicker:
            return Outcome(now, DialFailure.OF_THIS_MACHINE)
        if url in self.strangers:
            return self._connect_to_stranger(self.strangers[url], now, until)
        if url == "unix":
            return self._connect_near(now)
        if self.mode(now) is Mode.NAMELESS:
            at = now + self._random.choice((0.001, 2.0))
            return Outcome(at, DialFailure.NO_ANSWER) if at < until else _timed_out(until)
        return self._ask(now, until)

    def _ask(self, now: float, until: float) -> Outcome:
        for wait in SYNS:
            asked = now + wait
            at = asked + self._latency
            if asked >= until:
                break
            mode = self.mode(asked)
            if mode is Mode.UNREACHABLE:
                at += self._random.choice((0.0, 0.5, 3.0))
                return Outcome(at, DialFailure.NO_ANSWER) if at < until else _timed_out(until)
            if mode is Mode.GONE:
                return (
                    Outcome(at, DialFailure.ABSENT)
                    if at < until
                    else _timed_out(until, wait == 0.0)
                )
            if mode in (Mode.UP, Mode.RESTARTED):
                return Outcome(at, None, True) if at < until else _timed_out(until, wait == 0.0)
        return _timed_out(until)

    def _connect_near(self, now: float) -> Outcome:
        """Connect to the Unix name of a worker on this host, with no network between."""
        if self.mode(now) in ENDS:
            return Outcome(now, DialFailure.ABSENT)
        if self.mode(now) is Mode.BACKLOG:
            return Outcome(now, DialFailure.OF_THIS_MACHINE)
        return Outcome(now, None, True)

    def _connect_to_stranger(self, stranger: Stranger, now: float, until: float) -> Outcome:
        at = now + self._latency
        if at >= until:
            return _timed_out(until)
        refuses = stranger is Stranger.REFUSES_CONNECTIONS
        return Outcome(at, DialFailure.ABSENT if refuses else None)

    def talk(self, url: str, now: float, until: float) -> Outcome:
        """Shake hands over a connection; the worker may stand still in the middle of it."""
        random, failure = self._random, None
        stranger = self.strangers.get(url)
        if stranger is Stranger.SAYS_NOTHING:
            return Outcome(until, DialFailure.HANDSHAKE_UNFINISHED)
        if stranger is not None:
            is_worker = stranger is Stranger.OTHER_WORKER
            failure = DialFailure.ABSENT if is_worker else DialFailure.REFUSED
            return Outcome(min(until, now + self._latency), failure)
        at = now + 2 * self._latency
        if self.mode(now) is Mode.RESTARTED:
            failure = DialFailure.ABSENT
        elif random.random() < self._stall_chance:
            stall = random.choice((0.1, 1.0, 12.0, 60.0)) * (0.2 + 0.8 * random.random())
            at += stall
            self.last_stall = at
            if stall > ACCEPTOR_SECONDS and random.random() < 0.7:
                failure = DialFailure.HANDSHAKE_UNFINISHED  # it hangs up when it wakes
        if self.refuses and failure is None:
            failure = DialFailure.REFUSED
        if url != "unix" and self.mode(now) is Mode.UP and self.mode(at) in (Mode.DARK, *ENDS):
            at += self.dead_after if self.mode(at) is Mode.DARK else 0.0
            failure = DialFailure.HANDSHAKE_UNFINISHED
        if at >= until:
            return Outcome(until, DialFailure.HANDSHAKE_UNFINISHED, True)
        return Outcome(at, failure, True)


def _timed_out(until: float, reached: bool = False) -> Outcome:
    return Outcome(until, DialFailure.TIMED_OUT, reached)
