"""Asks workers what they do, all at once."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections import deque
from functools import partial
from typing import NamedTuple

from farcall.errors import LinkError
from farcall.monitor.finding import state_of, workers_here
from farcall.monitor.hearing import Hearing
from farcall.plain import encode_msgpack
from farcall.runtime.inspection.exchange import Exchange
from farcall.runtime.inspection.reports import MAX_REPORT, MemberReport, Question, WorkerReport
from farcall.runtime.options import switches
from farcall.runtime.options.credential import VARIABLE, Credentials
from farcall.runtime.options.secret import Secret
from farcall.transport.brief_threads import Several
from farcall.transport.connect import handshake
from farcall.transport.connect.addresses import UNIX, check_user, resolve, tcp_of
from farcall.transport.connect.credentials import LinkCredentials, Terms
from farcall.transport.connect.handshake_messages import MAX_ADDRESSES, Identity, printable
from farcall.transport.connect.tls_config import TlsConfig

SECONDS = 1.0
SPARE_SECONDS = 30.0  # beside the time of one worker, in which all of a machine have to be asked
SILENT = "it does not answer"
_THREADS = "farcall-monitor"
_MOST = 32  # questions at once
Urls = tuple[str, ...]

_ASKER = Identity("", -1, 0, asks=True)


class Contact(NamedTuple):
    """The addresses and credentials with which a worker is asked."""

    urls: Urls
    credentials: LinkCredentials


_TIMEVAL = struct.Struct("ll")


class _AsWorkers(NamedTuple):
    """The options of a worker that is given none."""

    tls: TlsConfig | None
    secret: Secret | None = None
    insecure: bool = False
    uses_machine_secret: bool = True


class SilentWorker(NamedTuple):
    """A worker that did not answer.

    Attributes:
        pid: on this machine; 0: it is on another one.
        name: if another worker has told it, else "".
        why: what came in the place of an answer.
        state: what the system says of the process, if it is on this machine.
    """

    pid: int
    name: str
    why: str
    state: str

    @property
    def refuses(self) -> bool:
        """Return whether it is there, but refuses this process: it has another secret, say."""
        return not self.why.startswith(SILENT)


class AskResult(NamedTuple):
    """The result of `ask_all`: workers that answered, by name, and those that did not."""

    reports: list[WorkerReport]
    silent: list[SilentWorker]

    def of_group(self, pid: int) -> AskResult:
        """Return the reports on the group that a process of this machine is in."""
        pids, before = {pid}, 0
        while len(pids) > before:
            before = len(pids)
            for report in self.reports:
                known = {report.pid, *(member.pid for member in report.members)}
                if pids & known:
                    pids |= known
        reports = [one for one in self.reports if one.pid in pids]
        names = {member.name for report in reports for member in report.members}
        silent = [one for one in self.silent if (one.pid or one.name) in pids | names]
        return AskResult(reports, silent)


def ask_all(*, stacks: bool = False, timeout: float = SECONDS) -> AskResult:
    """Ask all workers that can be found what they do. Blocks the calling thread; thread-safe.

    Those of this user on this machine are found by the system; those of other machines are told by
    these, and asked with the secret or the certificates that a worker started here would use.

    Args:
        stacks: also ask of each thread where it is.
        timeout: seconds; a worker that does not answer in that time counts as silent. Up to 32 are
            asked at once, and those of other machines after those of this one. Either takes at most
            half a minute more than that; a worker that was not asked until then is silent.

    Raises:
        ValueError: the credentials of this process can't be used, or the timeout is no number of
            seconds; the message says why.
    """
    return ask_and_keep(stacks=stacks, timeout=timeout)[0]


def ask_and_keep(*, stacks: bool, timeout: float) -> tuple[AskResult, dict[int, Contact]]:
    """Ask as `ask_all` does; also return how answering workers are asked, by incarnation."""
    question = Question(stacks)
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout}")

    hearing = Hearing()

    def ask(contacts: list[Contact]) -> list[WorkerReport | str]:
        end = time.monotonic() + timeout + SPARE_SECONDS
        asks = [partial(ask_one, one, question, timeout, hearing, end) for one in contacts]
        return Several(_THREADS, asks, _MOST).results()

    found = workers_here()
    none = LinkCredentials()  # the system says whose processes these are
    contacts = [Contact(one.urls, none) for one in found]
    near = ask(contacts)
    reports = [one for one in near if isinstance(one, WorkerReport)]
    far = _others(reports, [url for one in found for url in one.urls])
    told: list[WorkerReport | str] = []
    if far:
        ours = credentials_of_this_process()
        ways = [Contact(tuple(filter(tcp_of, one.addresses[:MAX_ADDRESSES])), ours) for one in far]
        contacts += ways
        told = ask(ways)
    told_names = {member.pid: member.name for report in reports for member in report.members}
    silent = [
        SilentWorker(one.pid, told_names.get(one.pid, ""), answer, state_of(one.pid))
        for one, answer in zip(found, near, strict=True)
        if isinstance(answer, str)
    ]
    for member, answer in zip(far, told, strict=True):
        if isinstance(answer, str):
            silent.append(SilentWorker(0, member.name, answer, ""))
        else:
            reports.append(answer)
    kept = {
        answer.incarnation: contact
        for contact, answer in zip(contacts, [*near, *told], strict=True)
        if isinstance(answer, WorkerReport)
    }
    return AskResult(sorted(reports, key=lambda one: (one.id, one.name)), silent), kept


def credentials_of_this_process() -> LinkCredentials:
    """Return what a worker that is started here would prove itself with.

    Raises:
        ValueError: it can't be used; the message says why.
    """
    said = os.environ.get(VARIABLE)
    try:
        credential = Credentials().choose(_AsWorkers(switches.tls(None)))
    finally:
        if said is not None:
            os.environ[VARIABLE] = said  # a worker may yet be started here, and take it
    return LinkCredentials(credential.key, credential.tls)


def _others(reports: list[WorkerReport], asked: list[str]) -> list[MemberReport]:
    """Return members that live and were not asked: elsewhere, or without a Unix socket."""
    known = {report.incarnation for report in reports}
    others = {
        member.incarnation: member
        for report in reports
        for member in report.members
        if not member.loss_cause and member.incarnation not in known
    }
    return [one for one in others.values() if not set(one.addresses) & set(asked)]


def ask_one(
    contact: Contact, question: Question, timeout: float, hearing: Hearing, end: float = math.inf
) -> WorkerReport | str:
    """Ask one worker, and return its answer, or why it gave none within so many seconds.

    Args:
        hearing: takes the report.
        end: on `time.monotonic()`, in seconds; it is not asked later than that.
    """
    until = min(time.monotonic() + timeout, end)
    why = "it has no address"
    # Where there is no room for one more connection, the other addresses come first.
    ways = deque((url, False) for url in contact.urls)
    while ways:
        url, waits = ways.popleft()
        if time.monotonic() >= until:
            return f"{SILENT} within {timeout:g} s"
        try:
            with _connected(url, until, waits=waits) as sock:
                # The system tells it that we are of its user, whatever its secret is.
                is_local = url.startswith(UNIX)
                terms = Terms(is_local=True) if is_local else contact.credentials.over(sock)
                met = handshake.connect(sock, _ASKER, terms, expects=0, deadline=until)
                exchange = Exchange(sock, met.keys, until)
                exchange.send(encode_msgpack(question))
                return hearing.report_in(exchange.receive(MAX_REPORT))
        except BlockingIOError:
            ways.append((url, True))
        except OSError as error:
            late = isinstance(error, TimeoutError) or time.monotonic() >= until
            why = f"{SILENT} within {timeout:g} s" if late else printable(str(error))
    return why


def _connected(url: str, until: float, *, waits: bool) -> socket.socket:
    """Connect to an address of a worker, and of this user's if it is a Unix socket.

    Raises:
        BlockingIOError: so many wait to be accepted that there is no room, unless this `waits`.
        PermissionError: another user listens there.
        OSError: it can't be reached.
    """
    left = max(0.001, until - time.monotonic())
    if url.startswith(UNIX):
        sock = socket.socket(socket.AF_UNIX)
        try:
            if waits:  # a timeout of Python's would not wait for room
                limit = _TIMEVAL.pack(int(left), int(left % 1 * 1e6))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setblocking(waits)
            sock.connect("\0" + url.removeprefix(UNIX))
            check_user(sock)
        except BaseException as error:
            sock.close()
            if waits and isinstance(error, BlockingIOError):
                raise TimeoutError("nothing is accepted there") from None
            raise
        return sock
    place = tcp_of(url)
    if place is None:
        raise LinkError(f"{url!r} can't be dialled")
    family, kind, _, _, address = resolve(*place, socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    try:
        sock.settimeout(left)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
