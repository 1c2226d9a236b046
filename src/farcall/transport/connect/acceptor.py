"""Listens on all addresses of an endpoint; one thread accepts connections from all of them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

from farcall.errors import LinkError
from farcall.log import get_logger
from farcall.threads import FarcallThread
from farcall.transport.connect import addresses
from farcall.transport.connect.strangers import StrangerLog
from farcall.transport.sockets.poller import READ, new_poller

logger = get_logger("farcall.transport")

PAUSE_SECONDS = 0.1

OnConnection = Callable[[socket.socket, str], None]


class Acceptor:
    """Listens from the start, accepts from `start` to `close`.

    Args:
        name: of the worker, for messages.
        listen: (host, port) to listen on; port 0 takes a free one.
        advertise: host names or addresses under which others reach us.
        on_connection: gets each connection, and who is at its other end, in the acceptor's thread.
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
        on_connection: OnConnection,
        strangers: StrangerLog,
        *,
        unix: bool = True,
    ) -> None:
        self._name = name
        self._on_connection = on_connection
        self._strangers = strangers
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
        self._thread = FarcallThread(self._accept_all, f"farcall-accept-{name}")

    def start(self) -> None:
        """Accept from now on.

        Raises:
            LinkError: the system has no thread for that.
        """
        refused = self._thread.try_start()
        if refused is not None:
            raise LinkError(f"no thread to accept connections: {refused}")

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            for listener, _ in self._poller.wait(None):
                if listener is not None:  # not woken up
                    self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, peer = addresses.accept(listener)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # Too many open files, or the stranger was gone already: others may do better.
            logger.warning("%s: could not accept a connection: %s", self._name, error)
            self._closed.wait(PAUSE_SECONDS)
            return
        if addresses.is_unix(sock):
            try:
                addresses.check_user(sock)
            except OSError as error:
                sock.close()
                self._strangers.log(logging.WARNING, "refused a connection: %s", error)
                return
        self._on_connection(sock, peer)

    def close(self) -> None:
        """Stop listening. Afterwards no connection comes any more. Once, by any thread."""
        self._closed.set()
        self._poller.wake()
        self._thread.join_if_started()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close them here only: in a child that was forked, while the parent goes on listening."""
        for listener in self._listeners:
            listener.close()
        self._poller.close()
