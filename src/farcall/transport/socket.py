"""Frames over sockets, in pure Python: TCP runs everywhere, and is the path that TLS will take.

Workers of one host use Unix sockets where there are any (`addresses.py`): that is tried first, and
when it fails, TCP.

One connection per direction of calling: whoever dials sends requests, the other answers. A thread
accepts connections; handshakes run on threads of their own, so that a stranger who connects and
says nothing delays nobody. Dead hosts are noticed by TCP keepalive, which the kernel answers even
while a peer's interpreter is busy; dead processes by their closed connections, at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport import addresses, handshake
from farcall.transport.acceptor import Acceptor
from farcall.transport.addresses import UNIX
from farcall.transport.base import Admit, Arrived, Event, Link, LinkLost, NotSent
from farcall.transport.handshake import Identity
from farcall.transport.poller import WRITE, new_poller
from farcall.transport.socket_link import SocketLink
from farcall.transport.spin import SpinBudget, Spinner
from farcall.wire import DEFAULT_LIMITS, Frame, Limits

logger = logging.getLogger("farcall.transport")

HANDSHAKE_SECONDS = 10.0
MAX_DIAL_SECONDS = 3600.0
MAX_HANDSHAKES = 32


class SocketEndpoint:
    """See `base.Endpoint`.

    Args:
        me: what to say of ourselves in handshakes.
        listen: (host, port) to listen on; port 0 takes a free one. A Unix socket is there as well,
            where there are any.
        advertise: host names or addresses under which others reach us.
        secret: what links are authenticated with; None for none.
        admit: asked about everyone who dials in.
        limits: what a peer may make us allocate.

    Raises:
        LinkError: the address can't be listened on.
    """

    def __init__(
        self,
        me: Identity,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        advertise: Sequence[str] = (),
        secret: bytes | None = None,
        admit: Admit = lambda name, incarnation: None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.me = me  # replaced once if the id is assigned after the endpoint listens
        self._secret = secret
        self._admit = admit
        self._limits = limits
        self._poller = new_poller()
        self._spin = SpinBudget()
        self._spinner = Spinner(self._spin)
        self._events: deque[Event] = deque()
        self._woken = False
        self._receiver = 0  # the thread inside `next`; others have to wake it
        self._lock = threading.Lock()  # guards the tables of links
        self._links: set[SocketLink] = set()
        self._lost: list[SocketLink] = []
        self._dialled: dict[int, SocketLink] = {}
        self._dialling: dict[int, threading.Lock] = {}
        self._closed = False
        self._acceptor = Acceptor(me.name, listen, advertise, self._on_connection)
        self._handshakes = ThreadPoolExecutor(MAX_HANDSHAKES, f"farcall-handshake-{me.name}")
        self._shaking: set[socket.socket] = set()
        self._acceptor.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._acceptor.addresses

    # Dialling.

    def connect(self, worker: Worker, deadline: float) -> SocketLink:
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

    def _dial(self, worker: Worker, deadline: float) -> SocketLink:
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
            try:
                peer = handshake.connect(
                    sock, self.me, self._secret, expects=worker.incarnation, deadline=until
                )
                return self._start_link(sock, peer, description)
            except BaseException as error:
                sock.close()
                # One that is silent may be busy, or stopped; only one that refuses is gone.
                if isinstance(error, LinkError) and time.monotonic() >= deadline:
                    raise NotSent from error
                if isinstance(error, OSError) and not isinstance(error, LinkError):
                    raise LinkError(f"the connection to {url} broke: {error}") from error
                raise
        if time.monotonic() >= deadline:
            raise NotSent
        why = "; ".join(failures) or "nobody listens at its addresses, or none is known"
        raise LinkError(f"can't reach worker {worker.name!r}: {why}")

    def _addresses_of(self, worker: Worker) -> list[str]:
        """Where to try, best first."""
        # The Unix name of a worker of another host is free on ours: whoever has seen it in the
        # rendezvous could listen on it, and be taken for that worker, or refuse in its place.
        elsewhere = worker.host and self.me.host and worker.host != self.me.host
        return [url for url in worker.addresses if not (elsewhere and url.startswith(UNIX))]

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
            reason = self._admit(identity.name, identity.incarnation)
            refused.extend([reason] if reason is not None else [])
            return reason

        try:
            until = time.monotonic() + HANDSHAKE_SECONDS
            worker = handshake.accept(sock, self.me, self._secret, deadline=until, admit=admit)
            kind = "unix" if addresses.is_unix(sock) else "tcp"
            self._start_link(sock, worker, f"{kind} from {peer}")
        except OSError as error:  # LinkError is one
            sock.close()
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

    def _start_link(self, sock: socket.socket, peer: Identity, description: str) -> SocketLink:
        addresses.tune(sock)
        link = SocketLink(
            sock,
            Worker(peer.name, peer.id, peer.incarnation, host=peer.host, main=peer.main),
            description,
            self._poller,
            self._spin,
            self._limits,
            self._on_frame,
            self._on_lost,
        )
        with self._lock:
            if self._closed:
                sock.close()
                raise LinkError("this worker has shut down")
            self._links.add(link)
        link.start()
        return link

    # Events.

    def _on_frame(self, link: SocketLink, frame: Frame) -> None:
        self._put(Arrived(link, frame))

    def _on_lost(self, link: SocketLink, cause: str) -> None:
        with self._lock:
            self._links.discard(link)
            self._lost.append(link)
            if self._dialled.get(link.peer.incarnation) is link:
                del self._dialled[link.peer.incarnation]
        self._put(LinkLost(link, cause))

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if self._receiver not in (0, threading.get_ident()):
            self._poller.wake()

    def next(self, timeout: float | None) -> Event | None:
        # Set before the events are looked at: whoever appends later sees it, and wakes us.
        self._receiver = threading.get_ident()
        try:
            if self._events:
                return self._events.popleft()
            return None if self._woken else self._receive(timeout)
        finally:
            self._receiver = 0
            self._woken = False  # whoever calls this looks at everything before it calls again

    def _receive(self, timeout: float | None) -> Event | None:
        if self._lost:
            self._free_lost()
        poller = self._poller
        if timeout == 0.0:
            ready = poller.wait(0.0)
        else:
            ready = self._spinner.wait(partial(poller.wait, 0.0), partial(poller.wait, timeout))
        for link, events in ready:
            if link is None:
                continue  # woken up
            if events & WRITE:
                link.write_residue()
            link.service()
        return self._events.popleft() if self._events else None

    def _free_lost(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, []
        busy = [link for link in lost if not link.free()]
        with self._lock:
            self._lost += busy

    def wake(self) -> None:
        self._woken = True
        if self._receiver:
            self._poller.wake()

    # Ending.

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def drop(self, peer: int, cause: str) -> None:
        with self._lock:
            links = [link for link in self._links if link.peer.incarnation == peer]
        for link in links:
            link.lose(cause)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, shaking = list(self._links), list(self._shaking)
        self._acceptor.close()
        for sock in shaking:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.lose("this worker has shut down")
        self._handshakes.shutdown(wait=True)
        self._free_lost()
        self._poller.wake()
        self._events.clear()
        self._poller.close()

    def forget(self) -> None:
        # No locks: their holders were not forked.
        self._closed = True
        self._acceptor.forget()
        for link in list(self._links):
            link.forget()
        self._poller.close()


def _seconds_until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), MAX_DIAL_SECONDS))
