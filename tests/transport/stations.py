"""Endpoints for the conformance suite: how to make and to read them on every transport."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import pytest
from patience import PATIENCE

from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.transport.base import Admit, Arrived, Endpoint, Event, Link, LinkLost
from farcall.transport.connect import acceptor, dialling
from farcall.transport.connect.connection import Connection
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.listening import Listening
from farcall.transport.inproc import InprocEndpoint, InprocNetwork
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint
from farcall.transport.process_group.group import RankGroup
from farcall.transport.sockets import endpoint as socket_transport
from farcall.transport.sockets import link as socket_link
from farcall.transport.sockets import poller
from farcall.transport.sockets.endpoint import SocketEndpoint
from farcall.transport.sockets.link import SocketLink
from farcall.transport.sockets.records import Sealer
from farcall.wire.frames import DEFAULT_LIMITS, Frame, Limits
from farcall.wire.messages import Buffer, Message, Reply, Request

# More than the kernel keeps for a connection between two processes of this machine, and than a
# ring holds. As a body: a buffer would go through a shared segment, if there are any.
LARGE = bytes(range(256)) * (24 << 12)

# Of a link, at the side that dialled it: other ones for each direction.
DIALLER_KEY, ACCEPTOR_KEY = bytes(range(32)), bytes(range(32, 64))

# Time limits in seconds, for a test that always uses up its limit: it takes the first one that
# suffices on this machine.
LIMITS = (0.2, 2.0, 20.0, PATIENCE)

Content = tuple[Message, int, bytes, list[bytes]]


def soon() -> float:
    return time.monotonic() + PATIENCE


def content(frame: Frame) -> Content:
    """Return the content of a frame, by which two are equal."""
    return frame.message, frame.call_id, bytes(frame.body), [bytes(b) for b in frame.buffers]


def request(call_id: int = 0, body: bytes = b"", buffers: Any = ()) -> Frame:
    return Frame(Request("module:function"), call_id, body, buffers)


def take(endpoint: Endpoint) -> Event:
    """Return the next event of an endpoint that no other thread reads."""
    deadline = soon()
    while time.monotonic() < deadline:
        event = endpoint.next(deadline - time.monotonic())
        if event is not None:
            return event
    raise AssertionError(f"no event in {PATIENCE} s")


class Threads:
    """Runs functions in threads of their own; an error of one fails the test at `join`."""

    def __init__(self) -> None:
        self._running: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, run: Callable[..., object], *args: object) -> None:
        def guarded() -> None:
            try:
                run(*args)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self._running.append(thread)
        thread.start()

    def join(self) -> None:
        deadline = soon()
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a thread of the test hangs"
        self._running.clear()
        if self._errors:
            raise self._errors[0]


class Station:
    """A worker's endpoint, and a thread that takes its events once `read` was called."""

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        self.worker = worker
        self.endpoint = endpoint
        self.events: queue.Queue[list[Event]] = queue.Queue()  # one in each
        self._reader: threading.Thread | None = None
        self._stopping = False

    def read(self, answer: Callable[[Arrived], None] | None = None) -> None:
        """Take events from now on: requests go to `answer` if given, the rest to `events`."""
        self._reader = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._reader.start()

    def _read(self, answer: Callable[[Arrived], None] | None) -> None:
        while not self._stopping:
            event = self.endpoint.next(None)
            if event is None:
                continue
            if answer and isinstance(event, Arrived) and isinstance(event.frame.message, Request):
                answer(event)
                del event
                continue
            # The box alone holds the event: else its buffers would be kept until this thread gets
            # its next turn, whenever that is.
            box = [event]
            del event
            self.events.put(box)

    def next(self) -> Event:
        return self.events.get(timeout=PATIENCE).pop()

    def arrived(self) -> Arrived:
        event = self.next()
        assert isinstance(event, Arrived), event
        return event

    def next_loss(self) -> LinkLost:
        event = self.next()
        assert isinstance(event, LinkLost), event
        return event

    def connect(self, to: Station) -> Link:
        return self.endpoint.connect(to.worker, soon())

    def stop_reading(self) -> None:
        self._stopping = True
        self.endpoint.wake()
        if self._reader is not None:
            self._reader.join(PATIENCE)
            assert not self._reader.is_alive(), "wake did not end `next`"

    def close(self) -> None:
        self.stop_reading()
        self.endpoint.close()


def dial(station: Station) -> socket.socket:
    """Open a connection to a station, on which a test says what it likes."""
    dialled = dialling.dial(station.worker.addresses[0], PATIENCE, PATIENCE)
    assert dialled is not None
    sock, _ = dialled
    sock.settimeout(PATIENCE)
    return sock


def echo(event: Arrived) -> None:
    """Answer with the request's own body and buffers."""
    frame = event.frame
    # A peer that has the reply may close before we know that it arrived; one without it notices.
    with contextlib.suppress(LinkError):
        event.link.send(Frame(Reply(), frame.call_id, frame.body, frame.buffers), soon())


def keys_of(*, dialled: bool, encrypts: bool) -> Keys:
    """Keys of one side of a link."""
    if dialled:
        return Keys(DIALLER_KEY, ACCEPTOR_KEY, encrypts)
    return Keys(ACCEPTOR_KEY, DIALLER_KEY, encrypts)


class KeyedEndpoint(SocketEndpoint):
    """All of its connections have keys, and frames go in records."""

    encrypts = True

    def _open_link(self, connection: Connection) -> SocketLink:
        keys = keys_of(dialled=connection.dialled, encrypts=self.encrypts)
        return super()._open_link(connection._replace(keys=keys))


class AuthenticatingEndpoint(KeyedEndpoint):
    encrypts = False


def sealed(sealer: Sealer, data: Buffer) -> bytes:
    """Return the records of these bytes."""
    sealer.put([data])
    records = bytearray().join(sealer.sealed)
    while sealer.seal():
        records += b"".join(sealer.sealed)
    return bytes(records)


def first_bytes_to(dialler: Endpoint, data: bytes) -> bytes:
    """Return bytes by which a dialled peer makes it read these bytes."""
    if isinstance(dialler, KeyedEndpoint):
        return sealed(Sealer(ACCEPTOR_KEY, dialler.encrypts), data)
    return data


def first_bytes_from_dialler(acceptor: Endpoint, data: bytes) -> bytes:
    """Return bytes by which a dialling peer makes it read these bytes."""
    if isinstance(acceptor, KeyedEndpoint):
        return sealed(Sealer(DIALLER_KEY, acceptor.encrypts), data)
    return data


class Net(Protocol):
    """Makes stations that can reach each other."""

    def station(self, name: str = ..., admit: Admit = ...) -> Station: ...


def welcome(name: str, incarnation: int, meeting: int) -> None:
    return None


class InprocNet:
    def __init__(self) -> None:
        self._network = InprocNetwork()
        self._ranks = count()

    def station(self, name: str = "", admit: Admit = welcome) -> Station:
        rank = next(self._ranks)
        me = Worker(name or f"w{rank}", rank, new_incarnation())
        endpoint = InprocEndpoint(self._network, me, admit)
        return Station(Worker(me.name, rank, me.incarnation, endpoint.addresses), endpoint)


class GroupNet:
    """Ranks of one process group, each given; there are no more stations than these."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._ranks = count()
        self._groups = groups

    def station(self, name: str = "", admit: Admit = welcome) -> Station:
        rank = next(self._ranks)
        me = Identity(name or f"w{rank}", rank, new_incarnation())
        endpoint = ProcessGroupEndpoint(me, self._groups[rank], admit)
        return Station(Worker(me.name, rank, me.incarnation, endpoint.addresses), endpoint)


class SocketNet:
    """Stations know of each other only addresses that begin with `by`."""

    def __init__(
        self,
        secret: bytes | None = None,
        by: str = "",
        make: Callable[..., Endpoint] = SocketEndpoint,
        **options: Any,
    ) -> None:
        self._secret = secret
        self._by = by
        self._make = make
        self.options = options
        self._ranks = count()

    def station(
        self,
        name: str = "",
        admit: Admit = welcome,
        *,
        host: str = "",
        limits: Limits = DEFAULT_LIMITS,
        **options: Any,
    ) -> Station:
        rank = next(self._ranks)
        options.setdefault("secret", self._secret)
        me = Identity(name or f"w{rank}", rank, new_incarnation(), host)
        listening = Listening(admit=admit, **self.options, **options)
        endpoint = self._make(me, listening, limits)
        known = tuple(url for url in endpoint.addresses if url.startswith(self._by))
        return Station(Worker(me.name, rank, me.incarnation, known), endpoint)


def use_selector_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the poller of platforms without epoll."""
    for module in (poller, socket_link, acceptor):
        monkeypatch.setattr(module, "READ", selectors.EVENT_READ)
    for module in (poller, socket_link, socket_transport, acceptor):
        monkeypatch.setattr(module, "WRITE", selectors.EVENT_WRITE)
    for module in (socket_transport, acceptor):
        monkeypatch.setattr(module, "new_poller", poller.SelectorPoller)
