"""Dialling a worker: which of its addresses to try, in which order, and what each try gave."""

from __future__ import annotations

import errno
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport import addresses, dark_hosts
from farcall.transport.addresses import UNIX
from farcall.transport.base import NotSent
from farcall.transport.forks import keep_from_children
from farcall.transport.handshake import Identity, Unfinished
from farcall.transport.listening import Listening

MAX_SECONDS = 3600.0

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # between attempts to reach a worker that may be alive
MAX_REDIAL_SECONDS = 300.0  # for calls without a timeout

NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
# What connecting fails with for a reason of this machine's, such as too many open files or, on a
# Unix socket, too many that dial at once.
OF_THIS_MACHINE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def seconds_until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), MAX_SECONDS))


def dial(url: str, timeout: float, bound: float) -> tuple[socket.socket, str] | None:
    """A connection to an address, and which path it is, for people.

    Args:
        timeout: seconds that TCP may take; a Unix socket connects, or fails, at once.
        bound: seconds after which a host that does not answer counts as dead.

    Returns:
        None: nothing has this address here. It is of a kind that this platform does not have, or a
        Unix name that nobody listens on, as all those of other hosts are.

    Raises:
        OSError: it can't be reached, or a process of another user listens on a Unix name.
    """
    if url.startswith(UNIX):
        return _dial_unix(url.removeprefix(UNIX))
    parts = urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        return None
    sock = _dial_tcp(parts.hostname, parts.port, time.monotonic() + max(0.001, timeout), bound)
    return sock, f"tcp {addresses.join(parts.hostname, parts.port)}"


def _dial_unix(name: str) -> tuple[socket.socket, str] | None:
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        keep_from_children(sock)
        # Not blocking: else a full backlog is waited for, and TCP is a way, too.
        sock.setblocking(False)
        sock.connect(f"\0{name}".encode())
        addresses.check_user(sock)
        addresses.tune(sock)
        return sock, f"unix {addresses.process_at(sock)}"
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _dial_tcp(host: str, port: int, deadline: float, bound: float) -> socket.socket:
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses.resolve(host, port, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            keep_from_children(sock)
            addresses.tune(sock)
            dark_hosts.limit(sock, bound)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure or OSError(f"{host} has no address")


class Dial:
    """One attempt to reach a worker, over all its addresses.

        for url, sock, description, until in attempt: ...

    Whoever iterates returns when a connection will do, and else says why not by `failed`.

    Args:
        worker: whom to reach.
        me: who dials.
        listening: which ways may be taken.
        deadline: on `time.monotonic()`, in seconds.

    Attributes:
        has_addresses: there is an address that may be tried.
        is_unfinished: it came to nothing in a way that proves nothing about the worker: it may be
            alive and busy, or its host away for a moment, so dialling again makes sense.
        is_silent: no address gave a connection, and not for a reason of this machine's.
    """

    def __init__(self, worker: Worker, me: Identity, listening: Listening, deadline: float) -> None:
        self._worker = worker
        self._listening = listening
        self._deadline = deadline
        self._elsewhere = bool(worker.host and me.host and worker.host != me.host)
        self._urls = [url for url in worker.addresses if self._may_try(url)]
        self.has_addresses = bool(self._urls)
        self._tried: list[str] = []
        self.is_unfinished = False
        self.is_silent = True
        self._is_over = False
        self._refusal: LinkError | None = None  # what the first that answered said

    def _may_try(self, url: str) -> bool:
        """Whether an address is a way that may be taken, and can lead to that worker.

        Both kinds of addresses that name this host are free on it if the worker runs elsewhere:
        whoever has seen them in the rendezvous could listen there, and be taken for that worker, or
        refuse in its place.
        """
        if url.startswith(UNIX):
            return self._listening.uses_unix and not self._elsewhere
        if "tcp" not in self._listening.paths:
            return False
        near = addresses.is_loopback_name(urlsplit(url).hostname or "")
        return not self._elsewhere if near else not self._listening.confined

    def __iter__(self) -> Iterator[tuple[str, socket.socket, str, float]]:
        for index, url in enumerate(self._urls):
            if self._is_over:
                return
            # The last address has all the time that is left; one before it leaves some to others.
            share = seconds_until(self._deadline) / (len(self._urls) - index)
            try:
                dialled = dial(url, share, self._listening.dead_host_timeout)
            except OSError as error:
                self._tried.append(f"{url}: {_reason(error)}")
                self.is_unfinished = self.is_unfinished or not _is_refusal(error)
                if error.errno in OF_THIS_MACHINE:
                    self.is_silent = False
                continue
            if dialled is None:
                self._tried.append(f"{url}: nobody listens there")
                continue
            sock, description = dialled
            self.is_silent = False
            # A Unix name is the worker's alone: one that is silent there is silent everywhere.
            left = seconds_until(self._deadline)
            share = left if url.startswith(UNIX) else min(share, left)
            yield url, sock, description, time.monotonic() + share

    def failed(self, url: str, error: OSError) -> None:
        """The handshake over the connection that was last given out failed.

        Raises:
            LinkError: the worker refused, and no other address will do better.
        """
        if isinstance(error, Unfinished) or not isinstance(error, LinkError):
            self._tried.append(f"{url}: {error}")
            self.is_unfinished = True
            self._is_over = url.startswith(UNIX)  # TCP would be no faster, and slower for good
            return
        refusal = error
        if url.startswith(UNIX) or url == self._urls[-1]:
            raise self._refusal or refusal
        # A host may have an address that is another host's, too, such as that of a bridge.
        self._refusal = self._refusal or refusal
        self._tried.append(f"{url}: {error}")

    def __str__(self) -> str:
        return "; ".join(self._tried)

    def late(self, url: str = "", error: BaseException | None = None) -> NotSent:
        """What a call that wants the link ends with when the deadline has passed.

        Args:
            url, error: a handshake that was under way then, and how it ended.
        """
        if url:
            self._tried.append(f"{url}: {error}")
        return NotSent(str(self))

    def gone(self, seconds: float) -> LinkError:
        """What to raise when the worker's host counts as dead."""
        return LinkError(
            f"can't reach worker {self._worker.name!r}: no connection for {seconds:.0f} s ({self})"
        )

    def error(self) -> Exception:
        """What to raise when no address has led to the worker."""
        if self._refusal is not None:
            return self._refusal
        if time.monotonic() >= self._deadline:
            return self.late()
        return LinkError(f"can't reach worker {self._worker.name!r}: {self._why()}")

    def _why(self) -> str:
        why = "; ".join(self._tried)
        left_out = [url for url in self._worker.addresses if url not in self._urls]
        if not why:
            why = "none of its addresses may be tried" if left_out else "it has no address"
        paths = self._listening.paths
        if "tcp" not in paths:
            return f"{why} (TCP is not tried: it is not among our paths, {', '.join(paths)})"
        if left_out and not self._urls:
            why += f" ({', '.join(left_out)}): "
            if self._listening.confined:
                why += (
                    "without a secret a worker calls those of its own machine only; set "
                    "FARCALL_SECRET to the same secret on all workers"
                )
            else:
                why += "they can be reached on its own machine only; see the option listen"
        return why


class Silence:
    """For how long a worker has given no connection, over all attempts to dial it.

    Only the attempts count, and not the time between those of two calls.

    Args:
        bound: after how many seconds its host counts as dead; 0: never.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._seconds = 0.0

    def note(self, attempt: Dial, began: float) -> None:
        """An attempt is over that began then, `time.monotonic()` seconds.

        Raises:
            LinkError: that was long enough.
        """
        if not attempt.is_silent:
            self._seconds = 0.0
            return
        self._seconds += time.monotonic() - began
        if 0 < self._bound <= self._seconds:
            raise attempt.gone(self._seconds)


def attempts(
    make: Callable[[], Dial], deadline: float, closing: threading.Event, silence: Silence
) -> Iterator[Dial]:
    """Attempts to reach a worker, until one says that the worker can't be reached.

    A connection that was never established is no proof of death: on a busy machine a handshake may
    take longer than the other side waits for it, and a host may be out of reach for a moment. A
    worker that is dead listens no more, which the next attempt finds out; a host that is dead is
    silent for long.

    Args:
        make: makes an attempt. Whoever iterates tries its addresses.
        deadline: on `time.monotonic()`, in seconds.
        closing: ends the attempts.
        silence: of the worker, up to now.

    Raises:
        LinkError: the worker can't be reached.
        NotSent: it may be alive, but the deadline has passed.
    """
    began = time.monotonic()
    pause = FIRST_PAUSE
    give_up_at = time.monotonic() + MAX_REDIAL_SECONDS
    while True:
        attempt = make()
        yield attempt
        silence.note(attempt, began)
        now = began = time.monotonic()
        if not attempt.is_unfinished or now >= give_up_at:
            raise attempt.error()
        if now + pause >= deadline:
            raise attempt.late()
        if closing.wait(pause * random.uniform(0.5, 1.0)):
            return
        pause = min(2 * pause, LONGEST_PAUSE)


def _is_refusal(error: OSError) -> bool:
    """Return whether the worker does not listen there.

    Its host says so, or another user's process listens, or no host has that name.
    """
    if isinstance(error, PermissionError):
        return error.errno is None
    if isinstance(error, socket.gaierror):
        return error.errno in NO_SUCH_NAME
    return isinstance(error, ConnectionRefusedError)


def _reason(error: OSError) -> str:
    return "no answer in time" if type(error) is TimeoutError and not error.errno else str(error)
