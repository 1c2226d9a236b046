"""Listens on all addresses of an endpoint; one thread accepts, and shakes hands with all strangers.

Nothing in that thread blocks. A connection leaves it for what may block: deciding whether its peer
is admitted, and making its link. One whose peer had nothing to prove comes back in between. For all
that are here `visitors.py` has the bounds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from farcall.errors import LinkError
from farcall.log import get_logger
from farcall.threads import FarcallThread
from farcall.transport.connect import addresses
from farcall.transport.connect.conversation import broken
from farcall.transport.connect.guests import Guest
from farcall.transport.connect.handshake_messages import Ended
from farcall.transport.connect.strangers import StrangerLog
from farcall.transport.connect.visitors import Visitor, Visitors
from farcall.transport.sockets.poller import READ, WRITE, new_poller

logger = get_logger("farcall.transport")

PAUSE_SECONDS = 0.1
AT_ONCE = 8  # connections that are accepted before those that are there are looked at
MOST_AT_ONCE = 128  # with those that had left again

OnProven = Callable[[Visitor], None]


class Acceptor:
    """Listens from the start, accepts from `start` to `close`.

    Args:
        name: of the worker, for messages.
        listen: (host, port) to listen on; port 0 takes a free one.
        advertise: host names or addresses under which others reach us.
        greet: begins our side of a handshake; may raise an OSError.
        on_proven: gets each connection whose peer is proven, and which is its own from then on, or
            until `take_back`: the conversation waits for `go_on`, or is over. It must not block.
        strangers: for lines about connections that come to nothing.
        unix: also listen on a Unix socket, where there are any.

    Raises:
        LinkError: the address can't be listened on.
    """

    def __init__(
        self,
        name: str,
        listen: tuple[str, int],
        advertise: Sequence[str],
        greet: Callable[[socket.socket], Guest],
        on_proven: OnProven,
        strangers: StrangerLog,
        *,
        unix: bool = True,
    ) -> None:
        self._greet = greet
        self._on_proven = on_proven
        self._strangers = strangers
        self._visitors = Visitors()
        self._returned: deque[Visitor] = deque()
        tcp = addresses.listen_tcp(*listen)
        local = addresses.listen_unix() if unix else None
        self._listeners = [tcp] if local is None else [local, tcp]
        hosts = advertise or [listen[0]]
        self.addresses = tuple(url for one in self._listeners for url in addresses.urls(one, hosts))
        self._poller = new_poller()
        for listener in self._listeners:
            listener.setblocking(False)  # a dialler may be gone when it is accepted
            self._poller.add(listener.fileno(), listener, READ)
        self._closed = threading.Event()
        self._thread = FarcallThread(self._run, f"farcall-accept-{name}")

    def start(self) -> None:
        """Accept from now on.

        Raises:
            LinkError: the system has no thread for that.
        """
        refused = self._thread.try_start()
        if refused is not None:
            raise LinkError(f"no thread to accept connections: {refused}")

    def _run(self) -> None:
        while not self._closed.is_set():
            end = self._visitors.next_end()
            ready = self._poller.wait(None if end is None else max(0.0, end - time.monotonic()))
            while self._returned:
                self._serve_again(self._returned.popleft())
            tokens = [token for token, _ in ready]
            for token in tokens:
                if isinstance(token, Visitor):
                    self._serve(token)
            for visitor in self._visitors.late(time.monotonic()):
                if not visitor.parts:
                    self._say_refused(visitor, broken(TimeoutError()))
                self._close(visitor)
            for token in tokens:
                if token is not None and not isinstance(token, Visitor):
                    self._accept_some(token)

    # Connections that are new.

    def _accept_some(self, listener: socket.socket) -> None:
        stay = 0
        try:
            for _ in range(MOST_AT_ONCE):
                stay += self._accept(listener)
                if stay == AT_ONCE:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # Too many open files, or the stranger was gone already: others may do better.
            self._strangers.log(
                "accept", logging.WARNING, "could not accept a connection: %s", error
            )
            oldest = self._visitors.oldest()
            if error.errno in (errno.EMFILE, errno.ENFILE) and oldest is not None:
                self._make_way(oldest)
            else:
                self._closed.wait(PAUSE_SECONDS)

    def _accept(self, listener: socket.socket) -> bool:
        """Accept a connection; return whether it is one to serve."""
        sock, who, origin = addresses.accept(listener)
        try:
            sock.setblocking(False)
            if _has_left(sock):  # a flood of such is nothing to anybody
                sock.close()
                self._strangers.log(origin, logging.DEBUG, "%s has left while it dialled", who)
                return False
            if addresses.is_unix(sock):
                addresses.check_user(sock)
            visitor = Visitor(sock, who, origin, self._greet(sock), time.monotonic())
        except OSError as error:
            sock.close()
            self._strangers.log(origin, logging.WARNING, "refused a connection: %s", error)
            return False
        self._add(visitor)
        return True

    def _add(self, visitor: Visitor) -> None:
        if (one := self._visitors.in_the_way(visitor)) is not None:
            self._make_way(one)
        self._visitors.add(visitor)
        self._poller.add(visitor.fd, visitor, READ)
        self._serve(visitor)

    def take_back(self, visitor: Visitor) -> None:
        """Have the rest of a handshake done here, with a peer that is a stranger still. Any thread.

        Args:
            visitor: whose conversation waits for the peer, or has something left to say to it.
        """
        self._returned.append(visitor)
        if self._closed.is_set():
            self._drop_returned()
        else:
            self._poller.wake()

    def _serve_again(self, visitor: Visitor) -> None:
        visitor.come_back(time.monotonic())
        self._add(visitor)

    # Connections that are there.

    def _serve(self, visitor: Visitor) -> None:
        if visitor.fd != visitor.sock.fileno():
            return  # it was closed since it was ready
        if visitor.parts:
            if visitor.has_left():
                self._close(visitor)
            return
        conversation = visitor.conversation
        try:
            visitor.advance()
        except OSError as error:
            self._say_refused(visitor, broken(error))
            self._close(visitor)
            return
        if conversation.failure is not None:
            if not visitor.waits_to_send:
                self._say_refused(visitor, conversation.failure)
                if not visitor.part(time.monotonic()):
                    self._close(visitor)
        elif visitor.may_leave:
            self._visitors.remove(visitor)
            self._poller.remove(visitor.fd)
            visitor.leave(time.monotonic())
            self._on_proven(visitor)
            return
        if visitor.sock.fileno() >= 0:
            self._poller.modify(visitor.fd, WRITE if visitor.waits_to_send else READ)

    def _say_refused(self, visitor: Visitor, error: LinkError) -> None:
        if isinstance(error, Ended):  # it died, or gave up: that is no refusal
            self._strangers.log(
                visitor.origin, logging.DEBUG, "%s while it dialled: %s", visitor.who, error
            )
            return
        # The agent's own decisions are nothing to warn of.
        level = logging.WARNING if visitor.guest.reason is None else logging.DEBUG
        self._strangers.log_refusal(visitor.origin, level, visitor.who, error)

    def _make_way(self, visitor: Visitor) -> None:
        self._say_refused(visitor, LinkError("too many connections that have proven nothing"))
        self._close(visitor)

    def _close(self, visitor: Visitor) -> None:
        if self._visitors.remove(visitor):
            self._poller.remove(visitor.fd)
            visitor.sock.close()
            visitor.guest.turn_away()

    # Ending.

    def close(self) -> None:
        """Stop listening. Afterwards no connection comes any more. Once, by any thread."""
        self._closed.set()
        self._poller.wake()
        self._thread.join_if_started()
        self._drop_returned()
        for visitor in self._visitors:
            visitor.guest.turn_away()
        self.close_descriptors()

    def _drop_returned(self) -> None:
        while self._returned:
            with contextlib.suppress(IndexError):  # another thread was faster
                visitor = self._returned.popleft()
                visitor.sock.close()
                visitor.guest.turn_away()

    def close_descriptors(self) -> None:
        """Close them here only: in a child that was forked, while the parent goes on listening."""
        for listener in self._listeners:
            listener.close()
        for visitor in (*self._visitors, *self._returned):
            visitor.sock.close()
        self._poller.close()


def _has_left(sock: socket.socket) -> bool:
    """Return whether the peer has closed a connection before it said anything."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
