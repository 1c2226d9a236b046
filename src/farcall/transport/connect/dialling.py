"""Dialling a worker: the sockets, what each failure is, and the callers that wait for the link.

When to try which address, and what failures mean, is decided by `protocol/connecting.py`.
"""

from __future__ import annotations

import errno
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from farcall.errors import BadFrame, LinkError
from farcall.ids import Worker
from farcall.protocol.connecting import (
    Address,
    Cause,
    Connecting,
    Dead,
    DialFailure,
    Instruction,
    Late,
    Linked,
    Pause,
    Talk,
    Try,
    WaitForDialler,
)
from farcall.transport.base import NotSent, Silent
from farcall.transport.connect import addresses, dark_hosts, race
from farcall.transport.connect.addresses import UNIX
from farcall.transport.connect.handshake_messages import Identity, NotHere, Unfinished
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.turns import DialTurns
from farcall.transport.forks import keep_from_children

MAX_SECONDS = 3600.0

# Errors of connecting for a reason of this machine's, such as too many open files or, on a
# Unix socket, too many that dial at once.
OF_THIS_MACHINE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

T = TypeVar("T")


def seconds_until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), MAX_SECONDS))


def dial(url: str, timeout: float, bound: float, pid: int = 0) -> tuple[socket.socket, str] | None:
    """Connect to an address; return the connection, and the path in words, for messages.

    Args:
        timeout: seconds that TCP may take; a Unix socket connects, or fails, at once.
        bound: seconds after which a host that does not answer counts as dead.
        pid: of the worker that is to be there; 0 if it is unknown. See `addresses.check_process`.

    Returns:
        None if the address means nothing here: it is of a kind that this platform does not have, or
        a Unix name without a listener, as all those of other hosts are.

    Raises:
        OSError: it can't be reached, or another process than the worker's listens on a Unix name.
    """
    if url.startswith(UNIX):
        return _dial_unix(url.removeprefix(UNIX), pid)
    place = addresses.tcp_of(url)
    if place is None:
        return None
    sock = _dial_tcp(*place, time.monotonic() + max(0.001, timeout), bound)
    return sock, f"tcp {addresses.join(*place)}"


def _dial_unix(name: str, pid: int) -> tuple[socket.socket, str] | None:
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        keep_from_children(sock)
        # Not blocking: else a full backlog is waited for, and TCP is a way, too.
        sock.setblocking(False)
        sock.connect(f"\0{name}".encode())
        addresses.check_user(sock)
        addresses.check_process(sock, pid)
        addresses.tune(sock)
        return sock, f"unix {addresses.process_at(sock)}"
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _dial_tcp(host: str, port: int, deadline: float, bound: float) -> socket.socket:
    """Connect to the first address of a host that answers. All of them get a share of the time.

    Raises:
        OSError: what proves least of what they failed with: only if all refuse, all are absent.
    """
    failure: OSError | None = None
    found = addresses.resolve(host, port, socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, address) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        until = time.monotonic() + max(0.001, (deadline - time.monotonic()) / left)
        make = partial(_tcp_socket, family, kind, protocol, bound)
        try:
            sock = race.connect(make, address, until)
            sock.settimeout(max(0.001, until - time.monotonic()))
            return sock
        except OSError as error:
            if failure is None or isinstance(failure, ConnectionRefusedError):
                failure = error
    raise failure or OSError(f"{host} has no address")


def _tcp_socket(family: int, kind: int, protocol: int, bound: float) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        keep_from_children(sock)
        addresses.tune(sock)
        dark_hosts.limit(sock, bound)
        return sock
    except BaseException:
        sock.close()
        raise


class Dialled(NamedTuple):
    """A connection to a worker's address, before the handshake.

    Attributes:
        url: of the address.
        description: which path this is, for people.
        until: when the handshake must be over, in seconds of `time.monotonic()`.
    """

    sock: socket.socket
    url: str
    description: str
    until: float


class Ways:
    """The addresses of a worker that may be tried.

    Args:
        worker: the one to reach.
        me: the dialling worker.
        listening: which ways may be taken.
    """

    def __init__(self, worker: Worker, me: Identity, listening: Listening) -> None:
        self._worker = worker
        self._listening = listening
        self._elsewhere = bool(worker.host and me.host and worker.host != me.host)
        self.urls = [url for url in worker.addresses if self._may_try(url)]

    def addresses(self) -> list[Address]:
        """Return the addresses for the machine. A Unix name is the worker's alone."""
        return [Address(url, url.startswith(UNIX)) for url in self.urls]

    def _may_try(self, url: str) -> bool:
        """Return whether an address is a way that may be taken, and can lead to that worker.

        Both kinds of addresses that name this host are free on it if the worker runs elsewhere:
        an observer of the rendezvous could listen there, and be taken for that worker, or refuse in
        its place.
        """
        if url.startswith(UNIX):
            return self._listening.uses_unix and not self._elsewhere
        if "tcp" not in self._listening.paths:
            return False
        # The answer is the same for a near address and for another, which takes long to tell apart.
        if self._elsewhere == self._listening.confined:
            return not self._elsewhere
        host, _ = addresses.tcp_of(url) or ("", 0)
        near = addresses.is_loopback_name(host)
        return not self._elsewhere if near else not self._listening.confined

    def explain(self, tried: str) -> str:
        """Return why no address has led to the worker, given what those that were tried said."""
        left_out = [url for url in self._worker.addresses if url not in self.urls]
        why = tried
        if not why:
            why = "none of its addresses may be tried" if left_out else "it has no address"
        paths = self._listening.paths
        if "tcp" not in paths:
            return f"{why} (TCP is not tried: it is not among our paths, {', '.join(paths)})"
        if left_out and not self.urls:
            why += f" ({', '.join(left_out)}): "
            if self._listening.confined:
                why += (
                    "a worker that is given no secret calls those of its own machine only; set "
                    "FARCALL_SECRET to the same secret on all workers"
                )
            else:
                why += "they can be reached on its own machine only; see the option listen"
        return why


class Dialler(Generic[T]):
    """Reaches one incarnation of a worker, for all callers that want it. Any thread may call.

    It carries out the instructions of `protocol.connecting`, and has no rules of its own.

    Args:
        worker: the one to reach.
        me: the dialling worker.
        listening: which ways may be taken.
        closing: ends all attempts.
        turns: of the dialling worker; taken for workers of its own host.

    Attributes:
        urls: all addresses of the worker.
    """

    def __init__(
        self,
        worker: Worker,
        me: Identity,
        listening: Listening,
        closing: threading.Event,
        turns: DialTurns | None = None,
    ) -> None:
        self.urls = worker.addresses
        self._worker = worker
        self._bound = listening.dead_host_timeout
        self._closing = closing
        self._turns = turns if worker.host and worker.host == me.host else None
        self._ways = Ways(worker, me, listening)
        self._changed = threading.Condition()  # guards the machine and the rest
        self._machine = Connecting(self._ways.addresses(), self._bound)
        self._results: list[T] = []
        self._refusals: list[LinkError] = []  # of the handshakes of a round
        self._tried: dict[str, str] = {}  # by address: what the last round gave

    @property
    def has_addresses(self) -> bool:
        """Return whether there is an address that may be tried."""
        return bool(self._ways.urls)

    @property
    def is_idle(self) -> bool:
        """Return whether no thread dials now."""
        return self._machine.is_idle

    def reach(self, deadline: float, talk: Callable[[Dialled], T]) -> T:
        """Return what `talk` returned, here or for another caller at the same time.

        Args:
            deadline: on `time.monotonic()`, in seconds.
            talk: shakes hands over a connection, or raises an OSError. The connection is closed if
                it raises anything.

        Raises:
            LinkError: the worker is dead, or refuses us, or this worker has shut down.
            NotSent: the worker may be alive, but the deadline has passed.
        """
        if self._turns is None or not self.is_idle:
            return self._reach(deadline, talk)
        with self._turns.turn(deadline):
            return self._reach(deadline, talk)

    def _reach(self, deadline: float, talk: Callable[[Dialled], T]) -> T:
        caller = object()
        try:
            with self._changed:
                step = self._machine.begin(caller, time.monotonic(), deadline)
            while True:
                match step:
                    case Linked():
                        return self._results[0]
                    case Dead():
                        raise self._death(step)
                    case Late():
                        raise NotSent(self._said() or self._nothing_tried())
                    case WaitForDialler(until):
                        step = self._wait(caller, until, deadline)
                    case Pause(until):
                        self._closing.wait(seconds_until(until))
                        self._check_open()
                        with self._changed:
                            step = self._machine.woke(caller, time.monotonic(), deadline)
                    case Try(url, until):
                        step = self._try(url, until, talk)
                    case Talk():
                        raise AssertionError("a connection is talked over where it was made")
        finally:
            with self._changed:
                self._machine.left(caller)
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise LinkError("this worker has shut down")

    def _wait(self, caller: object, until: float, deadline: float) -> Instruction:
        with self._changed:
            step = self._machine.woke(caller, time.monotonic(), deadline)
            if isinstance(step, WaitForDialler):  # no caller has ended in between
                self._changed.wait(seconds_until(until))
                step = self._machine.woke(caller, time.monotonic(), deadline)
            return step

    def _try(self, url: str, until: float, talk: Callable[[Dialled], T]) -> Instruction:
        if url == self._ways.urls[0]:
            self._refusals.clear()
        try:
            found = dial(url, seconds_until(until), self._bound, self._worker.pid)
        except OSError as error:
            return self._failed(url, failure_of(error), _reason(error))
        if found is None:
            return self._failed(url, DialFailure.ABSENT, "no process listens there")
        sock, description = found
        with self._changed:
            left = seconds_until(self._machine.connected(time.monotonic()).until)
        try:
            result = talk(Dialled(sock, url, description, time.monotonic() + left))
        except BaseException as error:
            sock.close()
            self._check_open()
            if not isinstance(error, OSError):
                raise
            failure = failure_of_handshake(error)
            if isinstance(error, LinkError) and failure is not DialFailure.HANDSHAKE_UNFINISHED:
                self._refusals.append(error)
            return self._failed(url, failure, str(error))
        with self._changed:
            self._results.append(result)
            self._machine.linked()
        return Linked()

    def _failed(self, url: str, failure: DialFailure, why: str) -> Instruction:
        with self._changed:
            self._tried[url] = why
            return self._machine.failed(time.monotonic(), failure, random.random())

    def _said(self) -> str:
        with self._changed:
            return "; ".join(f"{url}: {why}" for url, why in self._tried.items())

    def _nothing_tried(self) -> str:
        """Return why a caller's time is over although no address has failed."""
        if self.is_idle:
            return "there was no time to dial it"
        return "another call is still dialling it"

    def _death(self, dead: Dead) -> LinkError:
        name, said = self._worker.name, self._said()
        if dead.cause is Cause.SILENT:
            seconds = f"{dead.seconds:.0f} s"
            return Silent(f"can't reach worker {name!r}: no connection for {seconds} ({said})")
        if self._refusals:
            refusal = self._refusals[0]
            return type(refusal)(*refusal.args)  # its own for each caller
        return LinkError(f"can't reach worker {name!r}: {self._ways.explain(said)}")


def failure_of(error: OSError) -> DialFailure:
    """Return what it says of a worker that connecting to its address failed so."""
    if isinstance(error, PermissionError) and error.errno is None:
        return (
            DialFailure.ABSENT
        )  # a process of another user, or none of the worker's, listens there
    if isinstance(error, socket.gaierror):
        return DialFailure.NO_ANSWER  # names of hosts come and go while these live
    if isinstance(error, ConnectionRefusedError):
        return DialFailure.ABSENT
    if error.errno in OF_THIS_MACHINE:
        return DialFailure.OF_THIS_MACHINE
    return DialFailure.TIMED_OUT if isinstance(error, TimeoutError) else DialFailure.NO_ANSWER


def failure_of_handshake(error: OSError) -> DialFailure:
    """Return what it says of a worker that a handshake over a connection failed so."""
    if isinstance(error, NotHere | BadFrame):
        return DialFailure.ABSENT  # another process has the address now
    if isinstance(error, LinkError) and not isinstance(error, Unfinished):
        return DialFailure.REFUSED
    return DialFailure.HANDSHAKE_UNFINISHED


def _reason(error: OSError) -> str:
    # The system's timeout and ours are the same to a reader; either may be the first.
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
