"""Workers, the links between them, and the store at which they meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from farcall.ids import Worker, meeting_of, nth_incarnation, original
from farcall.protocol.directory import DirectoryMachine


class Mode(StrEnum):
    """The mode of the store for some time."""

    UP = "up"
    DARK = "dark"  # it does not answer
    DEAD = "dead"  # its host says that no process is there


class Change(NamedTuple):
    """A change of the store.

    Attributes:
        moment: when.
        mode: what it is like from then on.
        is_new: another process hosts it, and knows no worker.
    """

    moment: float
    mode: Mode
    is_new: bool


class Store:
    """A store: the workers that have names.

    Args:
        changes: what becomes of it, in order.
        seconds: what an answer takes.
    """

    def __init__(self, changes: list[Change], seconds: float) -> None:
        self.changes = changes
        self.seconds = seconds
        self.mode = Mode.UP
        self.number = 0  # of the process that hosts it
        self.records: dict[str, Worker] = {}

    def change(self, change: Change) -> None:
        """Change to the new mode now."""
        self.mode = change.mode
        if change.is_new:
            self.number += 1
            self.records.clear()

    def changes_at(self, now: float) -> float:
        """Return when it is different next; infinite: never."""
        return min((one.moment for one in self.changes if one.moment > now), default=math.inf)

    def find(self, key: str | int) -> Worker | None:
        """Return the worker of this name or id that is registered."""
        if isinstance(key, str):
            return self.records.get(key)
        return next((worker for worker in self.records.values() if worker.id == key), None)


class Client(NamedTuple):
    """A worker's connection to the store.

    Attributes:
        number: of the process that hosted the store.
        ends_at: when it fails, if it leads nowhere; else 0.
    """

    number: int
    ends_at: float = 0.0


@dataclass(eq=False)
class Record:
    """Another worker, or oneself: what `Peer` is to an agent.

    Attributes:
        begun: its original incarnation.
        meeting: of the two.
        keys: by which it may be found.
    """

    worker: Worker
    loss_cause: str | None = None
    left: str | None = None

    def __post_init__(self) -> None:
        worker = self.worker
        self.begun, self.meeting = original(worker.incarnation), meeting_of(worker.incarnation)
        self.keys = worker.name, worker.id, worker.info


@dataclass(eq=False)
class Node:
    """A worker.

    Attributes:
        me: as the others see it, with its original incarnation.
        machine: its directory.
        alive: it has neither died nor left.
        stands_until: when its process goes on, in seconds.
        links: those that it has, and has not seen end.
        dialling: incarnations that it dials.
        unnoted: losses that the directory has not been told of yet.
    """

    number: int
    me: Worker
    machine: DirectoryMachine[Record]
    alive: bool = True
    stands_until: float = 0.0
    links: list[Link] = field(default_factory=list)
    dialling: set[int] = field(default_factory=set)
    unnoted: int = 0

    def __str__(self) -> str:
        return f"{self.me.name}/{self.number}"

    def __post_init__(self) -> None:
        self.incarnation = self.me.incarnation  # the original one


@dataclass(eq=False)
class Link:
    """A link between two workers, in a meeting of the two."""

    dialler: Node
    acceptor: Node
    meeting: int

    def other(self, node: Node) -> Node:
        """Return the worker at the other end."""
        return self.acceptor if node is self.dialler else self.dialler

    def peer(self, node: Node) -> Worker:
        """Return the other worker as this one knows it: a hello says less than the store."""
        they = self.other(node).me
        incarnation = nth_incarnation(they.incarnation, self.meeting)
        return Worker(they.name, they.id, incarnation, they.addresses)
