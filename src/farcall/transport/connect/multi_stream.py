"""More connections for one link: which may join which link, and how they are dialled.

A link over TCP begins with one connection. The dialler gives it a name in its hello, 32 random
bytes, if both sides can use several. When the first large buffer goes either way, the dialler dials
the others, in the background. Each has a handshake of its own, in which it says the name of the
link that it joins. It is admitted if the link of that name was dialled by the same incarnation to
this one, and has not ended. So with a secret it is proven as the first was, the name included; and
without one, a stranger that has not seen the traffic can't guess the name.

The transport decides what goes over the connections.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from farcall.errors import LinkError
from farcall.transport.connect.handshake_messages import NONCE_LENGTH, Identity


class StreamTarget(NamedTuple):
    """The address and the worker by which further streams of a link are dialled.

    Attributes:
        family, address: of the socket, as of the first stream's.
        url: that address, as the worker advertises it.
        name, incarnation: of the worker that must answer.
        link: the link's name.
        streams: how many there may be, the first included.
    """

    family: int
    address: Any  # what `socket` takes; it depends on the family
    url: str
    name: str
    incarnation: int
    link: bytes
    streams: int


def naming_a_link(me: Identity) -> Identity:
    """Return what to say in the hello of a new link that others may join."""
    if me.streams <= 1:
        return me
    return msgspec.structs.replace(me, link=secrets.token_bytes(NONCE_LENGTH))


def streams_of(me: Identity, peer: Identity, link: bytes) -> int:
    """Return how many streams a link of that name may have."""
    return max(1, min(me.streams, peer.streams)) if link else 1


def target_of(sock: socket.socket, url: str, me: Identity, peer: Identity) -> StreamTarget:
    """Return where this worker dialled the first stream of a link."""
    streams = streams_of(me, peer, me.link)
    address = sock.getpeername()
    return StreamTarget(sock.family, address, url, peer.name, peer.incarnation, me.link, streams)


class _HasLossCause(Protocol):
    @property
    def loss_cause(self) -> str | None: ...


L = TypeVar("L", bound=_HasLossCause)


class _Expected(NamedTuple, Generic[L]):
    dialler: int  # its incarnation
    link: Future[L]  # done when the link is open: the dialler may be quicker than we are


class StreamRegistry(Generic[L]):
    """The links that were dialled to us and may be joined, by name. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the tables
        self._expected: dict[bytes, _Expected[L]] = {}
        self._names: dict[L, bytes] = {}

    def admit(self, dialler: Identity, me: Identity) -> str | None:
        """Ask this about everyone who dials in, once it is admitted and proven.

        If `streams_of` the link are several, `opened` or `failed` must follow.

        Returns:
            Why it is refused, or None.
        """
        with self._lock:
            if dialler.joins:
                found = self._expected.get(dialler.joins)
                known = found is not None and found.dialler == dialler.incarnation
                return None if known else "there is no link that it could join; it may have ended"
            if dialler.link in self._expected:
                return "another link has this name"
            if streams_of(me, dialler, dialler.link) > 1:
                self._expected[dialler.link] = _Expected(dialler.incarnation, Future())
            return None

    def wait_for(self, dialler: Identity, deadline: float) -> L:
        """Wait for the link that an admitted dialler joins.

        Raises:
            LinkError: it has ended, or is not open by the deadline.
        """
        with self._lock:
            found = self._expected.get(dialler.joins)
        if found is None:
            raise LinkError("the link that it joins has ended")
        try:
            return found.link.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            raise LinkError("the link that it joins was not opened in time") from error

    def opened(self, name: bytes, link: L) -> None:
        """Hear that the link of that name is there."""
        with self._lock:
            self._names[link] = name
            self._expected[name].link.set_result(link)
        if link.loss_cause is not None:  # and `discard` may have been called already
            self.discard(link)

    def failed(self, name: bytes) -> None:
        """Hear that there will be no link of that name."""
        with self._lock:
            found = self._expected.pop(name, None)
        if found is not None and not found.link.done():
            found.link.set_exception(LinkError("the link that it joins could not be opened"))

    def discard(self, link: L) -> None:
        """Let no stream join a link any more: it has ended."""
        with self._lock:
            self._expected.pop(self._names.pop(link, b""), None)
