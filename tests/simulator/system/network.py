"""Hosts of a simulated system, and the network between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from simulator.system.scheduler import Scheduler

Act = Callable[[], None]
LONGEST_RETRY = 3.0  # seconds until a kernel sends again, after a network is back


class Host:
    """A machine.

    Attributes:
        name: of the machine.
        address: its IPv4 address.
        ports: the last port that was given away.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.ports = 30_000

    def __repr__(self) -> str:
        return self.name


class Network:
    """The network between hosts. A message is late, or comes when it is back; none is lost."""

    def __init__(self, scheduler: Scheduler, random: Random, slowest: float) -> None:
        self.scheduler = scheduler
        self.random = random
        self.slowest = slowest
        self.hosts: dict[str, Host] = {}
        self._cuts: dict[frozenset[str], float] = {}
        self.outages: list[tuple[frozenset[str], float, float]] = []

    def add_host(self, name: str) -> Host:
        """Return a new host."""
        host = Host(name, f"10.0.0.{len(self.hosts) + 1}")
        self.hosts[host.address] = host
        return host

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Let nothing through between two hosts for some time."""
        ends = frozenset((one.name, other.name))
        until = self.scheduler.now + seconds
        self._cuts[ends] = max(until, self._cuts.get(ends, 0.0))
        self.outages.append((ends, self.scheduler.now, until))

    def darken(self, host: Host, seconds: float) -> None:
        """Let nothing through to or from a host for some time."""
        for other in self.hosts.values():
            if other is not host:
                self.cut(host, other, seconds)

    def cut_until(self, one: Host, other: Host) -> float:
        """Return when messages between two hosts get through, if they don't now; else the past."""
        return self._cuts.get(frozenset((one.name, other.name)), -math.inf)

    def is_cut(self, one: Host, other: Host) -> bool:
        """Return whether nothing gets through."""
        return one is not other and self.scheduler.now < self.cut_until(one, other)

    def delay(self, one: Host, other: Host) -> float:
        """Draw how long a message takes, in seconds."""
        if one is other:
            return self.random.choice((0.0, 1e-5, 1e-4)) * self.random.random()
        return self.random.choice((1e-4, 1e-3, self.slowest)) * self.random.random()

    def carry(self, one: Host, other: Host, act: Act) -> None:
        """Have a packet get from host to host, if need be by sending it again."""
        self.scheduler.after(self.delay(one, other), lambda: self._arrive(one, other, act))

    def _arrive(self, one: Host, other: Host, act: Act) -> None:
        if self.is_cut(one, other):
            again = self.cut_until(one, other) + self.random.random() * LONGEST_RETRY
            self.scheduler.at(again, lambda: self._arrive(one, other, act))
        else:
            act()
