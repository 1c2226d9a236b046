"""Makes connections and keeps their links: listening, accepting, dialling, handshakes, tables.

It does not know the bytes on a connection: an endpoint gives it `open_link`, which makes
a link of the endpoint's kind from a connection whose handshake is done.

Workers of one host use Unix sockets where there are any (`addresses.py`): that is tried first, and
when it fails, TCP.

One connection per direction of calling: the dialler sends requests, the other answers. A thread
accepts connections, and shakes hands with all strangers at once; for what may block, such as making
a link, one gets a thread. For large buffers a link over TCP may have several (`multi_stream.py`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec

from farcall.errors import LinkError
from farcall.ids import Worker, meeting_of, nth_incarnation, original
from farcall.log import get_logger, records_later
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.connect import addresses, dark_hosts, handshake, multi_stream, presence
from farcall.transport.connect.acceptor import Acceptor
from farcall.transport.connect.askers import Askers
from farcall.transport.connect.connection import Connection, KeptLink
from farcall.transport.connect.conversation import drive
from farcall.transport.connect.dark_hosts import HostWatch
from farcall.transport.connect.dialling import Dialled, Dialler
from farcall.transport.connect.guests import Guest
from farcall.transport.connect.handshake import HandshakeResult
from farcall.transport.connect.handshake_messages import (
    MAX_ADDRESSES,
    Ended,
    Identity,
    Unfinished,
    Unwanted,
)
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.link_table import LinkTable
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.multi_stream import StreamRegistry, StreamTarget
from farcall.transport.connect.strangers import StrangerLog
from farcall.transport.connect.turns import DialTurns
from farcall.transport.connect.versions import Versions
from farcall.transport.connect.visitors import Visitor
from farcall.transport.forks import keep_from_children
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall.transport")

HANDSHAKE_SECONDS = 10.0  # that a further stream has which we dial
# That workers have for the rest, once they know each other: 100 may start at once on two cores.
ESTABLISH_SECONDS = 60.0
MAX_HANDSHAKES = 32

L = TypeVar("L", bound=KeptLink)


class Connections(Generic[L]):
    """The links of one endpoint, dialled and accepted. Any thread may call anything.

    It listens when it is made, and accepts from `start` to `close`.

    Args:
        me: what to say of ourselves in handshakes. The attribute may be replaced; handshakes that
            begin later use the new one.
        listening: where to listen, and how to reach others. Its path "unix" is to listen on a
            Unix socket, too, where there are any, and to dial those of others; "tcp" is to dial
            TCP.
        open_link: makes the link of a connection. It runs in the thread of the handshake, without
            locks, and may talk to the peer's `open_link` up to the connection's deadline. The
            socket belongs to the link then. If it raises LinkError or OSError, the handshake has
            failed, and the connection is closed.
        give_up: gets a link that comes too late to be kept: it was lost before its `start`, or we
            have shut down meanwhile. For links that took the socket's descriptor: others need
            not do anything, their socket is closed.
        join: gives a link one more connection, whose handshake is done, and the keys of its
            records; raises LinkError if it can't. For links that may have several: `me` says how
            many.

    Raises:
        LinkError: the address can't be listened on.
        ValueError: the certificates can't be used.
    """

    def __init__(
        self,
        me: Identity,
        listening: Listening,
        open_link: Callable[[Connection], L],
        give_up: Callable[[L], None] | None = None,
        join: Callable[[L, socket.socket, Keys | None], None] | None = None,
    ) -> None:
        self._listening = listening
        self._credentials = listening.credentials()
        self._open_link = open_link
        self._give_up = give_up or (lambda _: None)  # its socket is closed
        self._join = join or _has_no_more
        self._lock = threading.Lock()  # guards the tables of links
        self._links: LinkTable[L] = LinkTable()
        self._dialled: dict[int, L] = {}
        self._diallers: dict[int, Dialler[L]] = {}  # of workers without a link
        self._stream_registry: StreamRegistry[L] = StreamRegistry()
        self._shaking: set[socket.socket] = set()
        self._closed = False
        self._closing = threading.Event()
        self._turns = DialTurns()
        self._strangers = StrangerLog(logger, me.name)
        self._versions = Versions(me.name)
        self._hosts: HostWatch[L] = HostWatch(
            me.name, listening.dead_host_timeout, lambda link, cause: link.fail(cause)
        )
        self._acceptor = Acceptor(
            me.name,
            listening.listen,
            listening.advertise,
            self._greet,
            self._on_proven,
            self._strangers,
            unix=listening.uses_unix,
        )
        self._background = BriefThreads(f"farcall-handshake-{me.name}", MAX_HANDSHAKES)
        self._askers = Askers(me.name, listening.answer)
        self.me = msgspec.structs.replace(me, addresses=self.addresses[:MAX_ADDRESSES])

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `base.Endpoint`."""
        return self._acceptor.addresses

    def start(self) -> None:
        """Accept connections from now on: `open_link` may be called at once.

        Raises:
            LinkError: the system has no thread for that. Everything is closed.
        """
        try:
            self._acceptor.start()
        except LinkError:
            self.close()
            raise

    # Dialling.

    def linked(self, worker: Worker) -> L | None:
        """See `base.Endpoint`."""
        link = self._dialled.get(worker.incarnation)
        return link if link is not None and link.loss_cause is None else None

    def connect(self, worker: Worker, deadline: float) -> L:
        """See `base.Endpoint`."""
        link = self._dialled.get(worker.incarnation)
        if link is not None and link.loss_cause is None:
            return link
        # Uninterrupted, since the peer has a link as soon as it has answered.
        return uninterrupted(
            lambda: self._connect(worker, deadline), f"farcall-dial-{self.me.name}"
        )

    @records_later()
    def _connect(self, worker: Worker, deadline: float) -> L:
        incarnation = worker.incarnation
        with self._lock:
            link = self._dialled.get(incarnation)
            if link is not None and link.loss_cause is None:
                return link
            dialler = self._diallers.get(incarnation)
            if dialler is None or (dialler.is_idle and dialler.urls != worker.addresses):
                dialler = Dialler(worker, self.me, self._listening, self._closing, self._turns)
                self._diallers[incarnation] = dialler
        try:
            link = dialler.reach(
                deadline, lambda dialled: self._handshake(worker, dialled, deadline)
            )
            if link.peer.incarnation != incarnation:
                raise LinkError(f"worker {worker.name!r} had given this one up; both begin anew")
            return link
        except LinkError as error:  # if it was late, the record of its silence is kept
            logger.debug("%s: no link to %r: %s", self.me.name, worker.name, error)
            with self._lock:
                if self._diallers.get(incarnation) is dialler:
                    del self._diallers[incarnation]
            raise

    def _handshake(self, worker: Worker, dialled: Dialled, deadline: float) -> L:
        logger.debug("%s: dialled %r at %s", self.me.name, worker.name, dialled.url)
        begun = original(worker.incarnation)
        sock = dialled.sock
        me = msgspec.structs.replace(self.me, meeting=self._listening.meeting(begun))
        if not addresses.is_unix(sock) and self._gains_by_streams(sock, worker):
            me = multi_stream.naming_a_link(me)
        peer, keys = self._shake(sock, me, worker.name, begun, dialled.url, dialled.until)
        if peer.meeting:
            reason = self._listening.admit(peer.name, peer.incarnation, peer.meeting)
            if reason is not None:
                raise Unwanted(f"this worker does not want worker {peer.name!r}: {reason}")
        # Keep the link even if the caller has timed out: the peer has it now, and would take its
        # end for our death.
        until = max(deadline, time.monotonic() + ESTABLISH_SECONDS)
        streams = multi_stream.streams_of(me, peer, me.link)
        target = multi_stream.target_of(sock, dialled.url, me, peer) if streams > 1 else None
        peer = _as_met(peer)
        connection = Connection(sock, peer, dialled.description, True, until, streams, target, keys)
        try:
            link = self._keep(connection)
        except OSError as error:  # LinkError is one
            raise Unfinished(f"the connection to {peer.name!r} broke: {error}") from error
        with self._lock:
            self._dialled[peer.incarnation] = link
            self._diallers.pop(worker.incarnation, None)
        return link

    def _shake(
        self, sock: socket.socket, me: Identity, name: str, expects: int, url: str, until: float
    ) -> HandshakeResult:
        return handshake.connect(
            sock,
            me,
            self._credentials.over(sock),
            expects=expects,
            deadline=until,
            expects_name=name,
            expects_address=url,
        )

    def _gains_by_streams(self, sock: socket.socket, worker: Worker) -> bool:
        # Over loopback the memory is the bottleneck, and several streams make it slower.
        if self._listening.streams is not None:
            return True
        return not (worker.host and worker.host == self.me.host) and not addresses.is_loopback(sock)

    def is_gone(self, worker: Worker, deadline: float) -> bool:
        """See `presence.is_gone`."""
        return presence.is_gone(
            worker, self.me, self._listening, self._credentials, self._closing, deadline
        )

    def answers(self, worker: Worker, deadline: float) -> bool:
        """See `presence.answers`."""
        return presence.answers(
            worker, self.me, self._listening, self._credentials, self._closing, deadline
        )

    # Accepting.

    def _greet(self, sock: socket.socket) -> Guest:
        addresses.tune(sock)
        if not addresses.is_unix(sock):
            dark_hosts.limit(sock, self._listening.dead_host_timeout)
        terms = self._credentials.over(sock)
        guest = (self.me, terms, self._listening, self._stream_registry)
        return Guest(*guest, sock.fileno(), self._links.count)

    def _on_proven(self, visitor: Visitor) -> None:
        with self._lock:
            self._shaking.add(visitor.sock)
        if self._closed or not self._background.run(partial(self._take_in, visitor)):
            self._no_longer_shakes(visitor.sock)
            visitor.sock.close()
            visitor.guest.turn_away()

    def _no_longer_shakes(self, sock: socket.socket) -> None:
        with self._lock:
            self._shaking.discard(sock)

    @records_later()
    def _take_in(self, visitor: Visitor) -> None:
        conversation, goes_back = visitor.conversation, False
        try:
            if not conversation.is_over:
                conversation.go_on()
                goes_back = not conversation.is_trusted
            if not goes_back:
                self._let_in(visitor)
        except OSError as error:  # LinkError is one
            visitor.sock.close()
            visitor.guest.turn_away()
            # The agent's own decisions are nothing to warn of, nor is one that died or gave up.
            is_usual = self._closed or visitor.guest.reason is not None or isinstance(error, Ended)
            level = logging.DEBUG if is_usual else logging.WARNING
            self._strangers.log_refusal(visitor.origin, level, visitor.who, error)
        finally:
            self._no_longer_shakes(visitor.sock)
        if goes_back:  # at once it may come to another thread, which notes that it shakes hands
            self._acceptor.take_back(visitor)

    def _let_in(self, visitor: Visitor) -> None:
        sock, until = visitor.sock, time.monotonic() + ESTABLISH_SECONDS
        is_near = addresses.is_unix(sock)
        worker, keys = drive(sock, visitor.conversation, until)
        if worker.asks:
            self._askers.take(sock, keys, visitor.who if is_near else visitor.origin)
        elif worker.joins:
            self._add(self._stream_registry.wait_for(worker, until), sock, keys)
        else:
            path = f"{'unix' if is_near else 'tcp'} from {visitor.who}"
            streams = multi_stream.streams_of(visitor.guest.me, worker, worker.link)
            link = self._keep(
                Connection(sock, _as_met(worker), path, False, until, streams, keys=keys)
            )
            if streams > 1:
                self._stream_registry.opened(worker.link, link)

    # Further streams of a link.

    def widen(self, link: L, target: StreamTarget) -> None:
        """Dial the further streams of a link in the background.

        The link does without those that it can't get.
        """
        for _ in range(target.streams - 1):
            self._background.run(partial(self._dial_stream, link, target), needed=False)

    def _dial_stream(self, link: L, target: StreamTarget) -> None:
        sock = socket.socket(target.family, socket.SOCK_STREAM)
        keep_from_children(sock)
        with self._lock:
            if self._closed or link.loss_cause is not None:
                sock.close()
                return
            self._shaking.add(sock)
        try:
            until = time.monotonic() + HANDSHAKE_SECONDS
            addresses.tune(sock)
            dark_hosts.limit(sock, self._listening.dead_host_timeout)
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.connect(target.address)
            me = msgspec.structs.replace(self.me, joins=target.link)
            expects = original(target.incarnation)
            _, keys = self._shake(sock, me, target.name, expects, target.url, until)
            self._add(link, sock, keys)
        except OSError as error:
            sock.close()
            logger.debug("%s: no further stream to %s: %s", self.me.name, target.address, error)
        finally:
            self._no_longer_shakes(sock)

    def _add(self, link: L, sock: socket.socket, keys: Keys | None) -> None:
        connection = self._hosts.note(sock)
        self._join(link, sock, keys)
        self._hosts.watch(link, connection)
        if link.loss_cause is not None:  # and `removed` may have been called already
            self._hosts.unwatch(link)

    # Links.

    def _keep(self, connection: Connection) -> L:
        self._versions.compare(self.me, connection.peer)
        logger.debug("%s: shook hands with %r", self.me.name, connection.peer.name)
        watched = self._hosts.note(connection.sock)
        link = self._open_link(connection)
        try:
            with self._lock:
                if self._closed:
                    raise LinkError("this worker has shut down")
                self._links.add(link)
            incarnation = link.peer.incarnation
            if self._listening.meeting(original(incarnation)) != meeting_of(incarnation):
                raise LinkError(f"worker {link.peer.name!r} was lost meanwhile")
            self._hosts.watch(link, watched)
            link.start()
            logger.debug(
                "%s: made a link to %r: %s", self.me.name, link.peer.name, link.description
            )
        except LinkError:  # no event tells of its end
            self.removed(link)
            self._give_up(link)
            raise
        return link

    def links(self) -> list[L]:
        """Return every link that is not lost."""
        with self._lock:
            return self._links.all()

    def of_peer(self, incarnation: int) -> list[L]:
        """Return the links that lead to one incarnation, and are not lost."""
        with self._lock:
            return self._links.of_peer(incarnation)

    def on_peer_lost(self, incarnation: int) -> None:
        """Drop all knowledge of a lost incarnation, but for the links that there are."""
        with self._lock:
            dialler = self._diallers.get(incarnation)
            if dialler is not None and dialler.is_idle:
                del self._diallers[incarnation]
        self._versions.discard(incarnation)

    def removed(self, link: L) -> None:
        """Take a link that is lost out of the tables."""
        self._stream_registry.discard(link)
        self._hosts.unwatch(link)
        with self._lock:
            was_kept = self._links.discard(link)
            if self._dialled.get(link.peer.incarnation) is link:
                del self._dialled[link.peer.incarnation]
        if was_kept:
            why = link.loss_cause or "this worker has shut down"
            said = "%s: lost the link to %r, %s: %s"
            logger.debug(said, self.me.name, link.peer.name, link.description, why)

    # Ending.

    def close(self) -> bool:
        """Stop listening, and end handshakes; return whether this call did it, and none before.

        Afterwards no new link comes: lose those there are.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._closing.set()
            shaking = list(self._shaking)
        self._turns.close()
        self._acceptor.close()
        self._hosts.close()
        for sock in shaking:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._background.close()
        self._askers.close()
        return True

    def close_after_fork(self) -> list[L]:
        """Close the copies of a child that was forked. Return the links, to be closed, too."""
        # No locks: their holders were not forked.
        self._closed = True
        self._acceptor.close_descriptors()
        return self._links.all()


def _as_met(peer: Identity) -> Identity:
    """Return who the peer is to this worker, in the meeting that both agree on."""
    return msgspec.structs.replace(
        peer, incarnation=nth_incarnation(peer.incarnation, peer.meeting)
    )


def _has_no_more(link: object, sock: socket.socket, keys: Keys | None) -> None:
    raise LinkError("a link of this transport has one connection")
