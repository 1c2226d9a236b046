"""Finding torch's TCPStore before torch itself is asked to connect to it.

torch's client prints tens of lines while no store listens, goes on after its timeout, and never
returns from something that takes its connection but is no store; a thread that is left in it aborts
the program at its end. So everything that may fail is tried here first, over plain sockets, until a
deadline: resolving the name, connecting, and a question that only a store answers.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.log import get_logger
from farcall.threads import FarcallThread
from farcall.transport.connect.addresses import is_loopback_name, resolve
from farcall.transport.forks import keep_from_children

logger = get_logger("farcall")

LOOPBACK = ("127.0.0.1", "::1")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
# One try, in seconds, unless it is the only address: others may answer.
ONE_OF_SEVERAL = 5.0
LONGEST_TRY = 3600.0

# The request that every version of torch's server understands, with libuv and without: "validate"
# with a magic number, and "check" for one key, which is answered by one byte.
_VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
_CHECK = struct.Struct("<BQQ")
_CHECK_CODE = 5
_NOT_THERE = b"\x01"

_Address = tuple[int, Any]  # family, and what `connect` takes


# A try with less time than this, in seconds, proves nothing if it ends for lack of time.
_FAIR_TRY = 0.25
_NO_TIME = "there was no time to look"


class _Stranger(Exception):
    """The listener at an address is no store. The message says what it did."""


class _Suspect(Exception):
    """The listener at an address behaves as no store does, but a busy one might."""


class _Late(Exception):
    """A try ended for lack of time. The message says in which phase."""


class StoreSearch:
    """Looks for a store at a host and port until the deadline.

    The thread that looks can be interrupted at any time. Only the system's resolver may be left
    behind, in a thread of its own, if it does not answer in time.

    Args:
        host, port: where.
        timeout: seconds; 0 for no limit.
        confined: look on this machine only; see `protected_mode`.
    """

    def __init__(self, host: str, port: int, timeout: float, *, confined: bool) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if timeout else math.inf
        self._confined = confined
        self._where = f"{host}:{port}"
        self._reason = _NO_TIME
        self._took = 0.0  # seconds until the try failed that gave the reason

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; `math.inf` without one."""
        return self._deadline - time.monotonic()

    def late(self, hint: str, reason: str = "") -> RendezvousTimeout:
        """Return the error of a search that took too long, for that reason, or the last one."""
        return RendezvousTimeout(
            f"no store answered at {self._where} in {self._timeout:.1f} s: "
            f"{reason or self._reason}{hint}"
        )

    def resolve(self, hint: str) -> list[str]:
        """Return the numeric addresses to try, best first.

        A worker that is confined to its machine takes loopback in the place of other addresses of
        this machine.

        Raises:
            RendezvousTimeout: the name means nothing, and did not until the deadline.
            RendezvousError: it is another machine, and this worker is confined to its own.
        """
        found = [str(address[0]) for _, address in self._look_up(hint)]
        if not self._confined:
            return found
        own = [address for address in found if is_loopback_name(address) or _is_own(address)]
        if not own:
            raise RendezvousError(
                f"the workers meet at {self._where} ({', '.join(found)}), which is another "
                "machine, but workers that are given no secret talk to those of their own machine "
                "only: set FARCALL_SECRET to the same secret on all workers"
            )
        near = [address for address in own if is_loopback_name(address)]
        if len(near) == len(own):
            return sorted(near, key=lambda address: ":" in address)
        return list(dict.fromkeys((*LOOPBACK, *own)))

    def _look_up(self, hint: str) -> list[_Address]:
        warned = False
        for _ in self._tries():
            found = self._ask_resolver()
            if found:
                return found
            if not warned:
                logger.warning("%s: trying again until the timeout", self._reason)
                warned = True
        raise self.late(hint)

    def _ask_resolver(self) -> list[_Address]:
        answers: list[list[_Address]] = []
        failures: list[str] = []

        def ask() -> None:
            try:
                infos = resolve(self._host, self._port, socket.SOCK_STREAM)
                answers.append(list(dict.fromkeys((info[0], info[4]) for info in infos)))
            except OSError as error:
                failures.append(str(error))

        thread = FarcallThread(ask, "farcall resolver")
        refused = thread.try_start()
        if refused is not None:
            failures.append(f"no thread for it: {refused}")
        began, seconds = time.monotonic(), max(self.remaining, 0.0)
        thread.join_if_started(min(seconds, threading.TIMEOUT_MAX))
        if answers:
            return answers[0]
        name = f"the name {self._host!r} can't be resolved"
        if failures:
            self._note(f"{name} ({failures[0]})", began)
        else:
            self._note_late(f"{name} (the resolver does not answer)", seconds)
        return []

    def _note(self, reason: str, began: float) -> None:
        """Note why a try failed that began at that time (`time.monotonic()` seconds)."""
        self._reason, self._took = reason, time.monotonic() - began

    def _note_late(self, reason: str, seconds: float) -> None:
        """Note that a try of so many seconds was too short for an answer.

        An earlier reason stays if this try had hardly more time than that one took.
        """
        if self._reason == _NO_TIME or seconds >= max(_FAIR_TRY, 2 * self._took):
            self._reason, self._took = reason, seconds

    def find(self, hint: str) -> str:
        """Return the numeric address of a store.

        Args:
            hint: what to say behind the reason when there is none.

        Raises:
            RendezvousTimeout: no store listens there until the deadline, or something else does.
            RendezvousError: something else listens there, and has said so; or see `resolve`.
        """
        addresses = self.resolve(hint)
        for _ in self._tries():
            strangers = []
            for address in addresses:
                began, seconds = time.monotonic(), self.remaining
                if len(addresses) > 1:
                    seconds = min(seconds, ONE_OF_SEVERAL)
                try:
                    _ask(address, self._port, max(seconds, 0.001))
                    return address
                except (_Stranger, _Suspect) as error:
                    self._note(f"something else listens at {address}: {error}", began)
                    if isinstance(error, _Stranger):
                        strangers.append(address)
                except _Late as error:
                    self._note_late(str(error), seconds)
                except OSError as error:
                    self._note(f"can't connect to {address} ({error})", began)
            if len(strangers) == len(addresses):
                raise RendezvousError(f"no store at {self._where}: {self._reason}{hint}")
        raise self.late(hint)

    def _tries(self) -> Iterator[None]:
        """Yield once, and again, with pauses that grow, until the deadline."""
        pause = SHORTEST_PAUSE
        while True:
            yield
            left = self.remaining
            if left > _FAIR_TRY:
                left -= _FAIR_TRY  # the last try has time for an answer
            time.sleep(min(pause, max(left, 0.0)))
            if self.remaining <= 0:
                return
            pause = min(1.5 * pause, LONGEST_PAUSE)


def _ask(address: str, port: int, seconds: float) -> None:
    """Return if a store answers.

    Raises:
        OSError: no program listens there.
        _Late: the connection or the answer was not there in time.
        _Suspect: something took the connection and closed it.
        _Stranger: the answer is not a store's.
    """
    seconds = min(seconds, LONGEST_TRY)
    deadline = time.monotonic() + seconds
    try:
        sock = socket.create_connection((address, port), timeout=seconds)
    except TimeoutError as error:
        if error.errno == errno.ETIMEDOUT:  # the system's own limit, a reason like any other
            raise
        raise _Late(f"can't connect to {address} (no answer)") from None
    except ConnectionResetError as error:
        raise _Suspect(f"it took the connection and closed it ({error})") from error
    with sock:
        try:
            answer = _exchange(sock, deadline)
        except TimeoutError:
            said = "it took the connection and said nothing"
            raise _Late(f"something else listens at {address}: {said}") from None
        except OSError as error:
            raise _Suspect(f"it took the connection and closed it ({error})") from error
    if not answer:
        raise _Suspect("it took the connection and closed it")
    if answer != _NOT_THERE:
        raise _Stranger(f"it said {answer!r}")


def _exchange(sock: socket.socket, deadline: float) -> bytes:
    """Ask, and return the answer with what else a stranger may have said at once."""
    key = f"farcall/probe/{secrets.token_hex(8)}".encode()
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.sendall(_VALIDATE + _CHECK.pack(_CHECK_CODE, 1, len(key)) + key)
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    answer = sock.recv(1)
    if answer != _NOT_THERE:
        sock.settimeout(0.1)
        with contextlib.suppress(OSError):
            answer += sock.recv(11)
    return answer


def _is_own(address: str) -> bool:
    """Return whether an address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def listen_on_loopback(addresses: list[str], port: int) -> socket.socket:
    """Return a listener for a store that this machine's workers alone can reach.

    Raises:
        OSError: the port is taken, or may not be had.
    """
    address = next((one for one in addresses if is_loopback_name(one)), LOOPBACK[0])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    keep_from_children(listener)
    return listener
