"""Identities: the names that travel between workers.

An *incarnation* is a random number drawn once for each life of a worker. A name may come back
after a crash; its incarnation never does. Everything that must not be mistaken across a restart
(links, references, calls) is keyed by incarnation, never by name.

Two living workers may lose each other by mistake, and meet again. To each the other is a new
incarnation then, as if it had been started anew: the number with which it began, and above that
how often the two have met again (`nth_incarnation`). That is between the two, and inside each of
them; messages have the number with which a worker began (`original`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Annotated, Any, NamedTuple, NewType, Self

import msgspec

from farcall.errors import InvalidName
from farcall.plain import plain_text, whole_number

Incarnation = NewType("Incarnation", int)


_BITS = 51
MET_AGAIN = 1 << _BITS  # and above: the incarnations of those that were met again
MAX_MEETINGS = (1 << 63 - _BITS) - 1  # of two workers that lose each other again and again


def new_incarnation() -> Incarnation:
    """Return a fresh incarnation: 51 random bits, never 0 (so that 0 can mean "anyone")."""
    return Incarnation(secrets.randbits(_BITS) | 1)


def nth_incarnation(incarnation: int, meeting: int) -> int:
    """Return what a worker is to another when the two have met again so many times."""
    return original(incarnation) | meeting << _BITS


def next_incarnation(incarnation: int) -> int:
    """Return what a worker that is lost will be when it is met again."""
    return incarnation + MET_AGAIN


def original(incarnation: int) -> int:
    """Return the incarnation with which a worker began, and which travels."""
    return incarnation & ((1 << _BITS) - 1)


def meeting_of(incarnation: int) -> int:
    """Return how many times a worker has been met again as that incarnation."""
    return incarnation >> _BITS


MAX_NAME_LENGTH = 127
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


def check_name(name: str) -> str:
    """Return the name as a plain `str`, if it is one for a worker.

    Raises:
        InvalidName: it is empty, too long, or has other characters.
    """
    if name == "":
        raise InvalidName("Worker name must be non-empty")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            f"Worker name must match {_NAME.pattern} (letters, digits, '_', ':', '-'), "
            f"but got {name!r}"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidName(
            f"Worker name must be shorter than 128 characters, but {name!r} has {len(name)}"
        )
    return plain_text(name)


def is_name(name: str) -> bool:
    """Return whether a worker can have that name."""
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


class WorkerInfo:
    """Name and id (rank) of a worker, as `get_worker_info` returns it.

    Raises InvalidName for what can't be a worker's name.

    Immutable, hashable and picklable. Accepted wherever a worker is named; cheaper than the name.
    """

    __slots__ = ("id", "name")

    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        object.__setattr__(self, "name", check_name(name))
        object.__setattr__(self, "id", whole_number("id", id))

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"WorkerInfo is immutable; can't set {key!r}")

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[Any, ...]]:
        return WorkerInfo, (self.name, self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return self.id == other.id and self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class Member(WorkerInfo):
    """A worker with its role, host and process, as `farcall.rpc.workers` returns it.

    Equal to the `WorkerInfo` of the same worker, and accepted wherever that is.

    Attributes:
        role: see `RpcBackendOptions`; "" if it has none.
        host: the name of its machine.
        pid: its process there.
    """

    __slots__ = ("host", "pid", "role")

    role: str
    host: str
    pid: int

    def __init__(self, name: str, id: int, role: str = "", host: str = "", pid: int = 0) -> None:
        super().__init__(name, id)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "pid", pid)

    def __reduce__(self) -> tuple[type[Member], tuple[Any, ...]]:
        return Member, (self.name, self.id, self.role, self.host, self.pid)

    def __repr__(self) -> str:
        more = f", role={self.role}" if self.role else ""
        return f"Member(id={self.id}, name={self.name}{more}, pid={self.pid} on {self.host})"


# The same object for the same worker: comparing identities is quicker than comparing fields.
worker_info = lru_cache(1024)(WorkerInfo)


class Worker(msgspec.Struct, frozen=True):
    """A worker's words about itself to the rendezvous.

    Attributes:
        name: unique among live workers.
        id: rank; unique among live workers.
        incarnation: of this life.
        addresses: URLs where it listens, best first: "unix:@farcall-3f8a..." (an abstract Unix
            socket, for workers of the same host), "tcp://10.0.0.1:3456", "inproc://w1".
        host: identifies the machine (two workers with the same value share a loopback interface).
        pid: process id, for messages.
        main: fingerprint of the program that runs as `__main__`, or "" when it has none. Workers
            with equal fingerprints may name functions of `__main__` to each other.
        strict: it has a policy: it takes no pickles, and is sent strict values.
        role: what it is for, in the words of its group; "" for nothing in particular.
    """

    name: str
    id: int
    incarnation: int
    addresses: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0
    main: str = ""
    strict: bool = False
    role: str = ""

    @property
    def info(self) -> WorkerInfo:
        return worker_info(self.name, self.id)


NUMBER_BYTES = 16

# Of a reference; b"" stands for none.
RefNumber = Annotated[bytes, msgspec.Meta(max_length=NUMBER_BYTES)]


class RefId(NamedTuple):
    """Identity of a remote value: the incarnation that minted it, and its number there.

    A member that knows it may use the value, so agents draw the numbers at random: see
    `UnguessableNumbers`.
    """

    minted_by: int
    number: RefNumber

    def __str__(self) -> str:
        return f"{self.minted_by}.{int.from_bytes(self.number, 'big'):x}"


_BLOCK_BYTES = 256 * NUMBER_BYTES


class UnguessableNumbers:
    """Numbers of 128 random bits, for references. Thread-safe; Ctrl-C does not end them.

    They are drawn in blocks: the system's generator lets another thread of Python run each time
    that it is asked.
    """

    __slots__ = ("_drawn",)

    def __init__(self) -> None:
        self._drawn: list[bytes] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        while True:
            try:
                return self._drawn.pop()
            except IndexError:
                block = os.urandom(_BLOCK_BYTES)
                starts = range(0, _BLOCK_BYTES, NUMBER_BYTES)
                self._drawn.extend([block[start : start + NUMBER_BYTES] for start in starts])


def counted_numbers() -> Iterator[bytes]:
    """Return the numbers 1, 2, 3 and so on for references of simulations: none is guessed."""
    return (number.to_bytes(NUMBER_BYTES, "big") for number in count(1))
