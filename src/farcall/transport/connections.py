"""Makes connections and keeps their links: listening, accepting, dialling, handshakes, tables.

What goes over a connection is none of its business: an endpoint gives it `open_link`, which makes
a link of the endpoint's kind from a connection whose handshake is done.

Workers of one host use Unix sockets where there are any (`addresses.py`): that is tried first, and
when it fails, TCP.

One connection per direction of calling: whoever dials sends requests, the other answers. A thread
accepts connections; handshakes run on threads of their own, so that a stranger who connects and
says nothing delays nobody.

A link over TCP may get more connections, for large buffers: see `joining.py`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport import addresses, handshake, joining
from farcall.transport.acceptor import Acceptor
from farcall.transport.addresses import UNIX
from farcall.transport.base import NotSent
from farcall.transport.handshake import Identity
from farcall.transport.joining import Joinable, Way
from farcall.transport.listening import Listening

logger = logging.getLogger("farcall.transport")

HANDSHAKE_SECONDS = 10.0
MAX_DIAL_SECONDS = 3600.0
MAX_HANDSHAKES = 32


class KeptLink(Protocol):
    """What has to be known of a link to keep it."""

    @property
    def peer(self) -> Worker:
        """Who is at the other end."""

    @property
    def lost(self) -> str | None:
        """Why the link ended, or None while it has not."""

    def start(self) -> None:
        """Called once, when the link is in the tables: from now on it may receive."""


L = TypeVar("L", bound=KeptLink)


class Connection(NamedTuple):
    """A stream socket that is ours alone, and who is at its other end: the handshake is done.

    Attributes:
        sock: nothing beyond the handshake was read from it. Its timeout may be anything.
        peer: what it said of itself, proven if there is a secret.
        description: which path this is, for people; see `base.Link.description`.
        dialled: by us, not by the peer.
        deadline: for `open_link`, on `time.monotonic()` in seconds.
        streams: how many connections the link may have, this one included.
        way: if there may be more, and we dialled: how to dial them, for `widen`.
    """

    sock: socket.socket
    peer: Identity
    description: str
    dialled: bool
    deadline: float
    streams: int = 1
    way: Way | None = None

    @property
    def worker(self) -> Worker:
        """The peer as the rest of farcall names it, without addresses."""
        peer = self.peer
        return Worker(peer.name, peer.id, peer.incarnation, host=peer.host, main=peer.main)


class Connections(Generic[L]):
    """The links of one endpoint, dialled and accepted. Any thread may call anything.

    It listens when it is made, and accepts from `start` to `close`.

    Args:
        me: what to say of ourselves in handshakes. The attribute may be replaced; handshakes that
            begin later use the new one.
        listening: where to listen, and how to reach others. Its path "unix" is to listen on a
            Unix socket, too, where there are any, and to dial those of others; "tcp" is to dial
            TCP. "shm" is as good as "unix", as shared memory is handed over on a Unix socket.
        open_link: makes the link of a connection. It runs in the thread of the handshake, without
            locks, and may talk to the peer's `open_link` up to the connection's deadline. The
            socket belongs to the link then. If it raises LinkError or OSError, the handshake has
            failed, and the connection is closed.
        give_up: gets a link that comes too late to be kept: it was lost before its `start`, or we
            have shut down meanwhile. For links that took the socket's descriptor: others need
            not do anything, their socket is closed.
        join: gives a link one more connection, whose handshake is done; raises LinkError if it
            can't. For links that may have several: `me` says how many.

    Raises:
        LinkError: the address can't be listened on.
    """

    def __init__(
        self,
        me: Identity,
        listening: Listening,
        open_link: Callable[[Connection], L],
        give_up: Callable[[L], None] | None = None,
        join: Callable[[L, socket.socket], None] | None = None,
    ) -> None:
        self.me = me
        self._listening = listening
        self._uses_unix = "unix" in listening.paths or "shm" in listening.paths
        self._open_link = open_link
        self._give_up = give_up or _is_closed_with_its_socket
        self._join = join or _has_no_more
        self._lock = threading.Lock()  # guards the tables of links
        self._links: set[L] = set()
        self._dialled: dict[int, L] = {}
        self._dialling: dict[int, threading.Lock] = {}
        self._joinable: Joinable[L] = Joinable()
        self._shaking: set[socket.socket] = set()
        self._closed = False
        self._acceptor = Acceptor(
            me.name,
            listening.listen,
            listening.advertise,
            self._on_connection,
            unix=self._uses_unix,
        )
        self._handshakes = ThreadPoolExecutor(MAX_HANDSHAKES, f"farcall-handshake-{me.name}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `base.Endpoint`."""
        return self._acceptor.addresses

    def start(self) -> None:
        """Accept connections from now on: `open_link` may be called at once."""
        self._acceptor.start()

    # Dialling.

    def connect(self, worker: Worker, deadline: float) -> L:
        """See `base.Endpoint`."""
        link = self._dialled.get(worker.incarnation)
        if link is not None and link.lost is None:
            return link
        with self._lock:
            dialling = self._dialling.setdefault(worker.incarnation, threading.Lock())
        if not dialling.acquire(timeout=_seconds_until(deadline)):
            raise NotSent
        try:
            link = self._dialled.get(worker.incarnation)
            if link is None or link.lost is not None:
                link = self._dial(worker, deadline)
                self._dialled[worker.incarnation] = link
            return link
        finally:
            dialling.release()

    def _dial(self, worker: Worker, deadline: float) -> L:
        failures = []
        for url in self._addresses_of(worker):
            try:
                dialled = addresses.dial(url, _seconds_until(deadline))
            except OSError as error:
                logger.debug("%s: could not connect to %s: %s", self.me.name, url, error)
                failures.append(f"{url}: {error}")
                continue
            if dialled is None:
                continue
            sock, description = dialled
            until = time.monotonic() + _seconds_until(deadline)
            me = self.me
            try:
                if not addresses.is_unix(sock) and self._gains_by_streams(sock, worker):
                    me = joining.naming_a_link(me)
                peer = handshake.connect(
                    sock,
                    me,
                    self._listening.secret,
                    expects=worker.incarnation,
                    deadline=until,
                )
                # The peer has a link now, whose end it would take for our death. So we want it,
                # too, even if that is too late for who has asked.
                until = time.monotonic() + HANDSHAKE_SECONDS
                streams = joining.streams_of(me, peer, me.link)
                way = joining.way_of(sock, me, peer) if streams > 1 else None
                return self._keep(Connection(sock, peer, description, True, until, streams, way))
            except BaseException as error:
                sock.close()
                # One that is silent may be busy, or stopped; only one that refuses is gone.
                if isinstance(error, LinkError | TimeoutError) and time.monotonic() >= deadline:
                    raise NotSent from error
                if isinstance(error, OSError) and not isinstance(error, LinkError):
                    raise LinkError(f"the connection to {url} broke: {error}") from error
                raise
        if time.monotonic() >= deadline:
            raise NotSent
        why = "; ".join(failures) or "nobody listens at its addresses, or none is known"
        paths = self._listening.paths
        if "tcp" not in paths:
            why += f" (TCP is not tried: it is not among our paths, {', '.join(paths)})"
        raise LinkError(f"can't reach worker {worker.name!r}: {why}")

    def _addresses_of(self, worker: Worker) -> list[str]:
        """Where to try, best first."""
        # The Unix name of a worker of another host is free on ours: whoever has seen it in the
        # rendezvous could listen on it, and be taken for that worker, or refuse in its place.
        elsewhere = worker.host and self.me.host and worker.host != self.me.host
        unix = self._uses_unix and not elsewhere
        tcp = "tcp" in self._listening.paths
        return [url for url in worker.addresses if (unix if url.startswith(UNIX) else tcp)]

    def _gains_by_streams(self, sock: socket.socket, worker: Worker) -> bool:
        # Over loopback the memory is what is slow, and several connections make it slower.
        if self._listening.streams is not None:
            return True
        is_near = worker.host != "" and worker.host == self.me.host
        return not is_near and not addresses.is_loopback(sock)

    # Accepting.

    def _on_connection(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._shaking.add(sock)
        try:
            self._handshakes.submit(self._accept_one, sock, peer)
        except RuntimeError:  # shut down between the check and here
            sock.close()

    def _accept_one(self, sock: socket.socket, peer: str) -> None:
        refused: list[str] = []  # the agent's own decisions are nothing to warn of

        def admit(identity: Identity) -> str | None:
            reason = self._listening.admit(identity.name, identity.incarnation)
            if reason is None:
                reason = self._joinable.admit(identity, me)
                expected.extend([identity.link] if reason is None and not identity.joins else [])
            refused.extend([reason] if reason is not None else [])
            return reason

        expected: list[bytes] = []  # the name of the link, once it may be joined
        me = self.me
        try:
            until = time.monotonic() + HANDSHAKE_SECONDS
            worker = handshake.accept(sock, me, self._listening.secret, deadline=until, admit=admit)
            if worker.joins:
                addresses.tune(sock)
                self._join(self._joinable.wait_for(worker, until), sock)
                return
            kind = "unix" if addresses.is_unix(sock) else "tcp"
            streams = joining.streams_of(me, worker, worker.link)
            link = self._keep(
                Connection(sock, worker, f"{kind} from {peer}", False, until, streams)
            )
            if streams > 1:
                self._joinable.opened(worker.link, link)
        except OSError as error:  # LinkError is one
            sock.close()
            for name in expected:
                self._joinable.failed(name)
            logger.log(
                logging.DEBUG if refused or self._closed else logging.WARNING,
                "%s: refused a connection from %s: %s",
                self.me.name,
                peer,
                error,
            )
        finally:
            with self._lock:
                self._shaking.discard(sock)

    # More connections for a link.

    def widen(self, link: L, way: Way) -> None:
        """Dial the connections that a link may have beside the first, in the background.

        Those that can't be had are done without.
        """
        for _ in range(way.streams - 1):
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._handshakes.submit(self._dial_side, link, way)

    def _dial_side(self, link: L, way: Way) -> None:
        sock = socket.socket(way.family, socket.SOCK_STREAM)
        with self._lock:
            if self._closed or link.lost is not None:
                sock.close()
                return
            self._shaking.add(sock)
        try:
            until = time.monotonic() + HANDSHAKE_SECONDS
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.connect(way.address)
            me = msgspec.structs.replace(self.me, joins=way.link)
            handshake.connect(
                sock, me, self._listening.secret, expects=way.incarnation, deadline=until
            )
            addresses.tune(sock)
            self._join(link, sock)
        except OSError as error:
            sock.close()
            logger.debug("%s: no further connection to %s: %s", self.me.name, way.address, error)
        finally:
            with self._lock:
                self._shaking.discard(sock)

    # Links.

    def _keep(self, connection: Connection) -> L:
        addresses.tune(connection.sock)
        link = self._open_link(connection)
        try:
            with self._lock:
                if self._closed:
                    raise LinkError("this worker has shut down")
                self._links.add(link)
            link.start()
        except LinkError:  # no event tells of its end
            self.removed(link)
            self._give_up(link)
            raise
        return link

    def links(self) -> list[L]:
        """Every link that is not lost."""
        with self._lock:
            return list(self._links)

    def of_peer(self, incarnation: int) -> list[L]:
        """Those of them that lead to one incarnation."""
        with self._lock:
            return [link for link in self._links if link.peer.incarnation == incarnation]

    def removed(self, link: L) -> None:
        """A link is lost: forget it."""
        self._joinable.lost(link)
        with self._lock:
            self._links.discard(link)
            if self._dialled.get(link.peer.incarnation) is link:
                del self._dialled[link.peer.incarnation]

    # Ending.

    def close(self) -> bool:
        """Stop listening, and end handshakes. Afterwards no new link comes: lose those there are.

        Returns:
            Whether this call did it; an earlier one may have.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            shaking = list(self._shaking)
        self._acceptor.close()
        for sock in shaking:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._handshakes.shutdown(wait=True)
        return True

    def forget(self) -> list[L]:
        """In a child that was forked: close its copies; the parent goes on listening.

        Returns:
            The links, for the endpoint to forget.
        """
        # No locks: their holders were not forked.
        self._closed = True
        self._acceptor.forget()
        return list(self._links)


def _is_closed_with_its_socket(link: object) -> None:
    pass


def _has_no_more(link: object, sock: socket.socket) -> None:
    raise LinkError("a link of this transport has one connection")


def _seconds_until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), MAX_DIAL_SECONDS))
