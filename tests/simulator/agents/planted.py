"""Mistakes planted in what drives the machines, to show that the simulation would find them.

Those with a star were farcall's own. Names of modules and attributes are resolved when the mistake
is planted, so that one that was renamed is noticed.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from farcall.protocol.connecting import DialFailure
from farcall.wire.messages import Cancel


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *_, **__: value


def _asks_itself(original: Any) -> Any:
    return lambda self, key, deadline: self._ask(key)


def _drops_cancels(original: Any) -> Any:
    def send(self: Any, box: Any, peer: Any, frame: Any, find_link: Any) -> None:
        if not isinstance(frame.message, Cancel) or find_link(0.0) is not None:
            original(self, box, peer, frame, find_link)

    return send


def _waits_for_link(original: Any) -> Any:
    def call_async(self: Any, to: Any, *rest: Any, **named: Any) -> Any:
        peer = self._directory.known(to) if isinstance(to, str) else None
        if peer is not None and peer.worker is not self._status.me:
            with contextlib.suppress(OSError):
                self._links._endpoint.connect(peer.worker, time.monotonic() + 5.0)
        return original(self, to, *rest, **named)

    return call_async


def _begins_at_zero(original: Any) -> Any:
    def make(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self._contexts._next = 0

    return make


def _every_second_time(original: Any) -> Any:
    """Do nothing every second time."""
    count = [0]

    def sometimes(*args: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*args, **named) if count[0] % 2 else None

    return sometimes


class AgentBug(Enum):
    """The mistakes to plant: the name on the command line, the part to replace, and by what."""

    module: str  # below `farcall.`
    path: str
    change: Callable[[Any], Any]  # given the original

    def __new__(cls, value: str, module: str, path: str, change: Callable[[Any], Any]) -> AgentBug:
        bug = object.__new__(cls)
        bug._value_ = value
        bug.module, bug.path, bug.change = module, path, change
        return bug

    DEAD_BY_ANY_ERROR = (  # *
        "dead-by-any-error",
        "transport.connect.dialling",
        "failure_of",
        _always(DialFailure.ABSENT),
    )
    DEAD_BY_SLOW_HANDSHAKE = (  # *
        "dead-by-slow-handshake",
        "transport.connect.dialling",
        "failure_of_handshake",
        _always(DialFailure.ABSENT),
    )
    NEVER_FINDS_HOSTS_DARK = (
        "never-finds-hosts-dark",
        "transport.connect.dark_hosts",
        "_Watched.look",
        _always(0.0),
    )
    ASKS_STORE_ITSELF = (  # *
        "asks-store-itself",
        "runtime.membership.lookup",
        "Lookup.find",
        _asks_itself,
    )
    CALLER_MAKES_LINK = (  # *
        "caller-makes-link",
        "runtime.calls.call_client",
        "CallClient.call_async",
        _waits_for_link,
    )
    DROPS_CANCELS_WITHOUT_LINK = (  # *
        "drops-cancels-without-link",
        "runtime.control",
        "ControlMessages._send",
        _drops_cancels,
    )
    LOOKS_FOR_NOBODY = (
        "looks-for-nobody",
        "runtime.membership.searching",
        "Search.begin",
        lambda original: _nothing,
    )
    CALLS_OUTLIVE_THE_LOST = (
        "calls-outlive-the-lost",
        "runtime.calls.call_completion",
        "CallCompletion.on_peer_lost",
        lambda original: _nothing,
    )
    VALUES_ARE_DROPPED_SOMETIMES = (
        "values-are-dropped-sometimes",
        "runtime.machine",
        "Machine._drop",
        _every_second_time,
    )
    SHUTDOWN_WAITS_FOR_THE_LOST = (
        "shutdown-waits-for-the-lost",
        "runtime.membership.shutdown",
        "ShutdownCoordinator.on_peer_lost",
        lambda original: _nothing,
    )
    SHUTDOWN_ASKS_NOBODY = (  # *
        "shutdown-asks-nobody",
        "runtime.membership.shutdown",
        "ShutdownCoordinator._ask_all",
        lambda original: _nothing,
    )
    COUNTS_CALLS_TWICE = (
        "counts-calls-twice",
        "runtime.membership.shutdown",
        "ShutdownCoordinator.end",
        _every_second_time,
    )
    FORGETS_DEADLINES = (
        "forgets-deadlines",
        "runtime.calls.deadlines",
        "Deadlines.note",
        _always(False),
    )
    FORGETS_HANDLES = (
        "forgets-handles",
        "runtime.references.handles",
        "References.on_collected",
        _every_second_time,
    )
    LEAVES_FOLLOWERS_ASLEEP = (
        "leaves-followers-asleep",
        "runtime.threads.followers",
        "Followers.wake",
        _always(True),
    )
    LEAVES_SOCKETS_OPEN = (
        "leaves-sockets-open",
        "transport.sockets.link",
        "SocketLink.free",
        _always(True),
    )
    REMINDS_NO_STORE = (
        "reminds-no-store",
        "runtime.membership.lookup",
        "Reminder._remind",
        lambda original: _nothing,
    )
    CONTEXTS_BEGIN_ANEW = (  # *
        "contexts-begin-anew",
        "autograd.autograd",
        "Autograd.__init__",
        _begins_at_zero,
    )


@contextlib.contextmanager
def planted(bug: AgentBug | None) -> Iterator[None]:
    """Have farcall make a mistake, inside the block."""
    if bug is None:
        yield
        return
    *path, name = bug.path.split(".")
    holder: Any = importlib.import_module(f"farcall.{bug.module}")
    for part in path:
        holder = getattr(holder, part)
    original = holder.__dict__[name]
    setattr(holder, name, bug.change(original))
    try:
        yield
    finally:
        setattr(holder, name, original)
