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
from typing import Any, NamedTuple

from farcall.protocol.connecting import Failure
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


def _seconds_only(original: Any) -> Any:
    def make(self: Any, agent: Any) -> None:
        original(self, agent)
        self._contexts._next = 0

    return make


def _first_half(original: Any) -> Any:
    """Every second time, do nothing."""
    count = [0]

    def sometimes(*args: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*args, **named) if count[0] % 2 else None

    return sometimes


class _Where(NamedTuple):
    module: str  # below `farcall.`
    name: str
    change: Callable[[Any], Any]


class AgentBug(Enum):
    """A mistake: what is replaced, and by what, given the original."""

    DEAD_BY_ANY_ERROR = _Where(  # *
        "transport.connect.dialling", "failure_of", _always(Failure.ABSENT)
    )
    DEAD_BY_SLOW_HANDSHAKE = _Where(  # *
        "transport.connect.dialling", "failure_of_handshake", _always(Failure.ABSENT)
    )
    NEVER_FINDS_HOSTS_DARK = _Where(
        "transport.connect.dark_hosts", "HostWatch.note", lambda original: _nothing
    )
    ASKS_STORE_ITSELF = _Where(  # *
        "runtime.membership.lookup", "Lookup.find", _asks_itself
    )
    CALLER_MAKES_LINK = _Where(  # *
        "runtime.calls.call_client", "CallClient.call_async", _waits_for_link
    )
    DROPS_CANCELS_WITHOUT_LINK = _Where(  # *
        "runtime.control", "ControlMessages._send", _drops_cancels
    )
    LOOKS_FOR_NOBODY = _Where(
        "runtime.membership.searching", "Search.begin", lambda original: _nothing
    )
    CALLS_OUTLIVE_THE_LOST = _Where(
        "runtime.calls.call_completion", "CallCompletion.lost", lambda original: _nothing
    )
    REFERENCES_OUTLIVE_THE_LOST = _Where(
        "runtime.machine", "Machine._drop", _first_half
    )
    SHUTDOWN_WAITS_FOR_THE_LOST = _Where(
        "runtime.membership.shutdown", "ShutdownCoordinator.lost", lambda original: _nothing
    )
    SHUTDOWN_ASKS_NOBODY = _Where(  # *
        "runtime.membership.shutdown", "ShutdownCoordinator._ask_all", lambda original: _nothing
    )
    COUNTS_CALLS_TWICE = _Where(
        "runtime.membership.shutdown", "ShutdownCoordinator.end", _first_half
    )
    FORGETS_DEADLINES = _Where(
        "runtime.calls.deadlines", "Deadlines.note", _always(False)
    )
    FORGETS_HANDLES = _Where(
        "runtime.references.handles", "References.forget", _first_half
    )
    LEAVES_FOLLOWERS_ASLEEP = _Where(
        "runtime.threads.followers", "Followers.wake", _always(True)
    )
    LEAVES_SOCKETS_OPEN = _Where(
        "transport.sockets.link", "SocketLink.free", _always(True)
    )
    REMINDS_NO_STORE = _Where(
        "runtime.membership.lookup", "Reminder._remind", lambda original: _nothing
    )
    CONTEXTS_BEGIN_ANEW = _Where(  # *
        "autograd.autograd", "Autograd.__init__", _seconds_only
    )

    @property
    def label(self) -> str:
        """As on the command line."""
        return self.name.lower().replace("_", "-")


@contextlib.contextmanager
def planted(bug: AgentBug | None) -> Iterator[None]:
    """Have farcall make a mistake, inside the block."""
    if bug is None:
        yield
        return
    where = bug.value
    module = importlib.import_module(f"farcall.{where.module}")
    *path, name = where.name.split(".")
    holder: Any = module
    for part in path:
        holder = getattr(holder, part)
    original = holder.__dict__[name]
    setattr(holder, name, where.change(original))
    try:
        yield
    finally:
        setattr(holder, name, original)
