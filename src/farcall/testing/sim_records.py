"""What a simulated worker is made of, and what it remembers of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farcall.ids import RefId
from farcall.protocol.calls import Incoming, Outgoing
from farcall.protocol.refs import Refs
from farcall.wire.messages import Message

SendMessage = Callable[[int, int, Message, int], None]  # from, to, message, call id


class Machines(NamedTuple):
    """The classes a worker is made of; a planted bug replaces one."""

    refs: type[Refs] = Refs
    outgoing: type[Outgoing[Any]] = Outgoing
    incoming: type[Incoming[Any]] = Incoming


class Call:
    """A call made from here."""

    __slots__ = ("call_id", "kept")

    def __init__(self) -> None:
        self.call_id = 0
        self.kept: Sequence[RefId] = ()  # used once more each until the call ends


class Task:
    """A call that is queued or running here."""

    __slots__ = (
        "answered",
        "arguments",
        "call_id",
        "caller",
        "has_uses",
        "is_creation",
        "is_deferred",
        "started",
    )

    def __init__(
        self, caller: int, call_id: int, is_creation: bool, is_deferred: bool = False
    ) -> None:
        self.caller = caller
        self.call_id = call_id
        self.is_creation = is_creation
        self.is_deferred = is_deferred  # its function returns a future, and runs no more after that
        self.started = False
        self.answered = False
        self.has_uses = False  # each reference of its request is used once more: all live here
        self.arguments: list[RefId] = []
