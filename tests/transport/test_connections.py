"""`Connections`: what it asks of an endpoint's `open_link`, and what becomes of the links."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import pytest
from sides import BareLink, Side, SideMaker
from stations import LIMITS, PATIENCE, Threads, soon

from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.runtime.membership.signing import MembershipProof, SecretSigner
from farcall.transport.base import NotSent
from farcall.transport.connect import dialling, handshake
from farcall.transport.connect.addresses import UNIX
from farcall.transport.connect.connection import Connection
from farcall.transport.connect.handshake import HandshakeResult
from farcall.transport.connect.turns import AT_ONCE, DialTurns
from farcall.transport.connect.visitors import Visitor

needs_unix = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")


def assert_closed(sock: socket.socket) -> None:
    assert sock.fileno() == -1


# What `open_link` gets.


def test_both_sides_open_a_link_by_the_handshake(side: SideMaker) -> None:
    opened: queue.Queue[Connection] = queue.Queue()

    def open_link(connection: Connection) -> BareLink:
        opened.put(connection)
        return BareLink(connection)

    near, distant = side("near"), side("distant", open_link)
    before = time.monotonic()
    link = near.connect(distant)
    ours, theirs = link.connection, opened.get(timeout=PATIENCE)
    assert (ours.dialled, theirs.dialled) == (True, False)
    assert before < ours.deadline < math.inf
    assert before < theirs.deadline < math.inf
    assert (ours.peer.name, theirs.peer.name) == ("distant", "near")
    worker = near.worker
    assert theirs.worker == Worker(
        worker.name, worker.id, worker.incarnation, worker.addresses, "here", main="main of near"
    )
    assert theirs.description.split()[1] == "from"


def test_both_sides_of_open_link_may_talk_over_the_connection(side: SideMaker) -> None:
    heard: queue.Queue[bytes] = queue.Queue()

    def open_link(connection: Connection) -> BareLink:
        link = BareLink(connection)
        connection.sock.sendall(b"dialled" if connection.dialled else b"taken!!")
        heard.put(connection.sock.recv(7, socket.MSG_WAITALL))
        return link

    link = side("near", open_link).connect(side("distant", open_link))
    assert {heard.get(timeout=PATIENCE) for _ in range(2)} == {b"dialled", b"taken!!"}
    assert link.started == 1


# The fate of links.


def test_link_is_dialled_once_and_again_when_it_was_removed(side: SideMaker) -> None:
    near, distant = side("near"), side("distant")
    first = near.connect(distant)
    assert near.connect(distant) is first
    assert near.connections.links() == near.connections.of_peer(first.peer.incarnation) == [first]
    assert near.connections.of_peer(first.peer.incarnation + 1) == []
    first.loss_cause = "the test"
    near.connections.removed(first)
    first.connection.sock.close()
    assert near.connections.links() == []
    second = near.connect(distant)
    assert second is not first
    assert (first.started, second.started) == (1, 1)
    near.connections.removed(first)  # it is not taken for the second
    assert near.connect(distant) is second


@pytest.mark.parametrize("error", [LinkError("no memory"), OSError(12, "no memory")])
def test_open_link_that_fails_on_the_dialling_side_is_dialled_again(
    side: SideMaker, error: OSError
) -> None:
    opened: list[Connection] = []

    def open_link(connection: Connection) -> BareLink:
        opened.append(connection)
        if len(opened) == 1:
            raise error
        return BareLink(connection)

    near, distant = side("near", open_link), side("distant")
    assert near.connect(distant).started == 1
    assert_closed(opened[0].sock)
    assert len(near.connections.links()) == 1


@pytest.mark.parametrize("error", [LinkError("no memory"), OSError(12, "no memory")])
def test_open_link_that_fails_on_the_accepting_side_is_a_failed_handshake(
    side: SideMaker, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    def open_link(connection: Connection) -> BareLink:
        raise error

    caplog.set_level(logging.DEBUG, "farcall.transport")  # no warning if it is closed by then
    near, distant = side("near"), side("distant", open_link)
    link = near.connect(distant)
    assert link.connection.sock.recv(1) == b""
    distant.close()  # joins the threads of handshakes
    assert distant.connections.links() == []
    assert "refused a connection from" in caplog.text
    assert "no memory" in caplog.text


@pytest.mark.parametrize("error", [LinkError("silent"), TimeoutError("silent")])
def test_open_link_that_is_silent_until_the_deadline_was_not_sent_to(
    side: SideMaker, error: OSError
) -> None:
    def open_link(connection: Connection) -> BareLink:
        while time.monotonic() < deadline:
            connection.sock.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                connection.sock.recv(1)
        raise error

    near, distant = side("near", open_link), side("distant")
    deadline = time.monotonic() + 0.2
    with pytest.raises(NotSent):
        near.connect(distant, deadline)


# The peer would take the end of a link for our death.
def test_dial_that_is_late_when_the_peer_has_its_link_goes_on(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, shake = dialling.dial, handshake.connect
    shaken = threading.Event()

    def shake_until_late(*args: Any, **options: Any) -> HandshakeResult:
        met = shake(*args, **{**options, "deadline": soon()})
        shaken.set()
        while time.monotonic() < deadline:
            pass
        return met

    monkeypatch.setattr(dialling, "dial", lambda url, *_: dial(url, PATIENCE, PATIENCE))
    monkeypatch.setattr(handshake, "connect", shake_until_late)
    near, distant = side("near"), side("distant")
    link = None
    for seconds in (0.0, 0.01, 0.1, 1.0, PATIENCE):  # a slow machine shakes hands later than that
        deadline = time.monotonic() + seconds
        try:
            link = near.connect(distant, deadline)
        except TimeoutError:
            assert not shaken.is_set()
        if link is not None:
            break
    assert link is not None
    assert link.started == 1
    assert link.connection.deadline > deadline + 1  # time enough for `open_link`


# A connection that comes to nothing says nothing about the worker.


class Cutting:
    """Listens in front of a worker, and closes its first connections.

    Args:
        url: where the worker listens.
        after: of what the worker says, the dialler gets to see so many bytes.
        count: so many connections are closed.
    """

    def __init__(self, url: str, after: int, count: int) -> None:
        self.closed = 0
        self._url, self._after, self._count = url, after, count
        if url.startswith(UNIX):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("")  # a free abstract name
            self.url = f"{UNIX}{self._listener.getsockname()[1:].decode()}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen()
        self._sockets = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                dialled = dialling.dial(self._url, PATIENCE, 30.0)
                assert dialled is not None
                theirs = dialled[0]
                theirs.setblocking(True)
                self._sockets += [ours, theirs]
                threading.Thread(target=self._pass_on, args=(ours, theirs), daemon=True).start()
                cuts = self.closed < self._count
                self.closed += cuts
                self._pass_on(theirs, ours, self._after if cuts else 1 << 30)

    def _pass_on(self, source: socket.socket, to: socket.socket, count: int = 1 << 30) -> None:
        with contextlib.suppress(OSError):
            while count and (data := source.recv(min(count, 1 << 16))):
                to.sendall(data)
                count -= len(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def through(cutting: Cutting, side: Side) -> Worker:
    """Return the worker of a side that says it listens where the connections are cut."""
    me, worker = side.connections.me, side.worker
    side.connections.me = msgspec.structs.replace(me, addresses=(*me.addresses, cutting.url))
    return Worker(worker.name, worker.id, worker.incarnation, (cutting.url,), worker.host)


@needs_unix
@pytest.mark.parametrize("after", [0, 1, 3, 4, 20, 60])
@pytest.mark.parametrize("secret", [None, b"s"])
@pytest.mark.parametrize("kind", [0, 1])
def test_handshake_that_is_cut_anywhere_begins_again(
    side: SideMaker, kind: int, secret: bytes | None, after: int
) -> None:
    near, distant = side("near", secret=secret), side("distant", secret=secret)
    cutting = Cutting(distant.worker.addresses[kind], after, 3)
    try:
        link = near.connections.connect(through(cutting, distant), soon())
        assert link.started == 1
        assert cutting.closed == 3
    finally:
        cutting.close()


@needs_unix
@pytest.mark.parametrize("kind", [0, 1])
def test_worker_that_dies_in_the_handshake_is_found_dead(side: SideMaker, kind: int) -> None:
    near, distant = side("near"), side("distant")
    cutting = Cutting(distant.worker.addresses[kind], 0, 1 << 30)
    ending = threading.Timer(0.2, cutting.close)
    ending.start()
    with pytest.raises(LinkError, match=r"no process listens|refused"):
        near.connections.connect(through(cutting, distant), math.inf)
    ending.join()


def late(near: Side, worker: Worker, *words: str) -> str:
    """Connect until the deadline has passed, each time; return an error that has these words."""
    said = ""
    for seconds in LIMITS:
        with pytest.raises(NotSent) as raised:
            near.connections.connect(worker, time.monotonic() + seconds)
        said = str(raised.value)
        if all(word in said for word in words):
            break
    return said


def test_handshakes_that_are_cut_up_to_the_deadline_are_no_death(side: SideMaker) -> None:
    near, distant = side("near"), side("distant")
    cutting = Cutting(distant.worker.addresses[-1], 0, 1 << 30)
    try:
        said = late(near, through(cutting, distant), "handshake")
    finally:
        cutting.close()
    assert "handshake" in said


OF_THE_NETWORK = {
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EADDRNOTAVAIL,
    errno.EACCES,
    errno.EPERM,
    errno.EPROTO,
    socket.EAI_AGAIN,
}


@pytest.mark.parametrize("number", sorted(dialling.OF_THIS_MACHINE | OF_THE_NETWORK))
def test_connection_that_can_not_be_made_for_a_moment_is_no_death(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    dial, failures = dialling.dial, [OSError(number, os.strerror(number)) for _ in range(6)]

    def fail_at_first(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return dial(*args)

    near, distant = side("near"), side("distant")
    monkeypatch.setattr(dialling, "dial", fail_at_first)
    assert near.connect(distant).started == 1


def test_closing_ends_a_dial_that_begins_again_and_again(side: SideMaker, threads: Threads) -> None:
    near, distant = side("near"), side("distant")
    cutting = Cutting(distant.worker.addresses[-1], 0, 1 << 30)

    def dial() -> None:
        with pytest.raises(LinkError, match="shut down"):
            near.connections.connect(through(cutting, distant), math.inf)

    threads.start(dial)
    while cutting.closed < 2:
        time.sleep(0.01)
    near.connections.close()
    threads.join()
    cutting.close()


# Ending.


def test_closing_ends_an_open_link_that_waits_for_its_peer(side: SideMaker) -> None:
    waiting, handed_back = threading.Event(), threading.Event()

    def open_link(connection: Connection) -> BareLink:
        link = BareLink(connection)
        waiting.set()
        if not connection.sock.recv(1):
            raise LinkError("the peer said nothing")
        return link

    near, distant = side("near"), side("distant", open_link)
    acceptor, take_in = distant.connections._acceptor, distant.connections._take_in
    take_back = acceptor.take_back

    def take_back_late(visitor: Visitor) -> None:
        take_back(visitor)
        assert waiting.wait(PATIENCE)  # another thread has it

    def take_in_once(visitor: Visitor) -> None:
        take_in(visitor)
        handed_back.set()

    acceptor.take_back = take_back_late  # type: ignore[method-assign]
    distant.connections._take_in = take_in_once  # type: ignore[method-assign]
    link = near.connect(distant)
    assert waiting.wait(PATIENCE)
    assert handed_back.wait(PATIENCE)
    assert len(distant.connections._shaking) == 1
    assert distant.connections.close()
    assert distant.connections.links() == []
    assert not distant.connections.close()
    assert link.connection.sock.recv(1) == b""


def test_link_that_is_opened_when_all_is_closed_is_not_kept(
    side: SideMaker, threads: Threads
) -> None:
    opened, go_on = threading.Event(), threading.Event()
    links: list[BareLink] = []

    def open_link(connection: Connection) -> BareLink:
        links.append(BareLink(connection))
        opened.set()
        assert go_on.wait(PATIENCE)
        return links[0]

    def dial() -> None:
        with pytest.raises(LinkError, match="shut down"):
            near.connect(distant)

    near, distant = side("near", open_link), side("distant")
    threads.start(dial)
    assert opened.wait(PATIENCE)
    near.connections.close()
    go_on.set()
    threads.join()
    assert near.connections.links() == []
    assert near.given_up == links
    assert links[0].started == 0
    assert_closed(links[0].connection.sock)


def test_link_that_is_lost_before_its_start_is_given_up(side: SideMaker) -> None:
    lost: list[BareLink] = []

    class LostLink(BareLink):
        def start(self) -> None:
            if not lost:
                lost.append(self)
                raise LinkError("lost by the test")

    near, distant = side("near", LostLink), side("distant")
    kept = near.connect(distant)
    assert near.connections.links() == [kept]
    (link,) = near.given_up
    assert [link] == lost
    assert_closed(link.connection.sock)


# Paths.


def kinds(side: Side) -> list[str]:
    return [url.partition(":")[0] for url in side.worker.addresses]


@needs_unix
@pytest.mark.parametrize(
    ("paths", "listened", "description"),
    [
        (("shm", "unix", "tcp"), ["unix", "tcp"], "unix"),
        (("shm", "tcp"), ["unix", "tcp"], "unix"),
        (("unix",), ["unix", "tcp"], "unix"),
        (("shm",), ["unix", "tcp"], "unix"),
        (("tcp",), ["tcp"], "tcp"),
    ],
)
def test_paths_choose_the_addresses_to_listen_on_and_dial(
    side: SideMaker, paths: tuple[str, ...], listened: list[str], description: str
) -> None:
    near, distant = side("near", paths=paths), side("distant")
    assert kinds(near) == listened
    assert near.connect(distant).connection.description.startswith(f"{description} ")


def test_tcp_is_not_dialled_when_it_is_no_path(side: SideMaker) -> None:
    near, distant = side("near", paths=("unix",)), side("distant")
    known = distant.worker
    tcp = tuple(url for url in known.addresses if not url.startswith(UNIX))
    worker = Worker(known.name, known.id, known.incarnation, tcp)
    with pytest.raises(LinkError, match=r"'distant': .* paths"):
        near.connections.connect(worker, soon())


@needs_unix
def test_tcp_is_listened_on_when_it_is_no_path(side: SideMaker) -> None:
    near, distant = side("near", paths=("tcp",)), side("distant", paths=("unix",))
    assert near.connect(distant).connection.description.startswith("tcp ")


# Users.


needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becoming another user takes root"
)
NOBODY = 65534


@needs_unix
@needs_root
def test_processes_of_another_user_are_refused_when_they_dial(
    side: SideMaker, caplog: pytest.LogCaptureFixture
) -> None:
    near = side("near")
    name = near.worker.addresses[0].removeprefix(UNIX)
    dial = (
        f"import os, socket; os.setuid({NOBODY})\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        f"sock.connect('\\0{name}')\n"
        "try:\n"
        "    print(sock.recv(1))\n"
        "except ConnectionResetError:\n"
        "    print(b'')\n"
    )
    said = subprocess.run([sys.executable, "-c", dial], capture_output=True, text=True, check=True)
    assert said.stdout == "b''\n"
    near.close()
    assert f"belongs to another user (uid {NOBODY}, not 0)" in caplog.text


@needs_unix
@needs_root
def test_processes_of_another_user_are_refused_when_they_listen(side: SideMaker) -> None:
    near, distant = side("near"), side("distant")
    name = f"farcall-impostor-{new_incarnation()}"
    listen = (
        f"import os, socket; os.setuid({NOBODY})\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        f"sock.bind('\\0{name}')\n"
        "sock.listen()\n"
        "print('ready', flush=True)\n"
        "peer, _ = sock.accept()\n"
        "print(peer.recv(1))\n"
    )
    impostor = subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    assert impostor.stdout is not None
    try:
        assert impostor.stdout.readline() == "ready\n"
        known = distant.worker
        worker = Worker(known.name, known.id, known.incarnation, (f"{UNIX}{name}",))
        with pytest.raises(LinkError, match=f"belongs to another user .uid {NOBODY}, not 0"):
            near.connections.connect(worker, soon())
        assert impostor.stdout.readline() == "b''\n"  # not even our hello
    finally:
        impostor.kill()
        impostor.wait()
        impostor.stdout.close()


# Addresses that are dialled.


@pytest.mark.parametrize("host", ["10.255.255.1", "[fd00::1]", "a.name", "localhost.evil.example"])
def test_worker_that_is_confined_to_its_machine_dials_no_other(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    dialled: list[str] = []
    monkeypatch.setattr(dialling, "dial", lambda url, *_: dialled.append(url))
    near = side("near", confined=True)
    worker = Worker("far", 1, new_incarnation(), (f"tcp://{host}:9",))
    with pytest.raises(LinkError, match="own machine only; set FARCALL_SECRET"):
        near.connections.connect(worker, soon())
    assert dialled == []


def test_loopback_of_another_host_is_not_dialled(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []
    monkeypatch.setattr(dialling, "dial", lambda url, *_: dialled.append(url))
    near = side("near")
    urls = ("tcp://127.0.0.1:9", "tcp://[::1]:9", "tcp://localhost:9", "unix:@some-name")
    worker = Worker("far", 1, new_incarnation(), urls, "another host")
    with pytest.raises(LinkError, match="on its own machine only"):
        near.connections.connect(worker, soon())
    assert dialled == []


def test_every_address_that_was_tried_is_named_with_its_reason(side: SideMaker) -> None:
    near, distant = side("near"), side("distant")
    distant.close()
    *_, tcp = distant.worker.addresses
    known = distant.worker
    worker = Worker(known.name, known.id, known.incarnation, ("tcp://no.such.invalid:9", tcp))
    # No death: the name may be there again in a moment.
    words = ("tcp://no.such.invalid:9: [Errno -", f"{tcp}: [Errno 111] Connection refused")
    said = late(near, worker, *words)
    assert words[0] in said
    assert words[1] in said


def test_another_worker_at_the_first_address_is_passed_over(side: SideMaker) -> None:
    """Hosts may have addresses in common, such as that of a bridge for containers."""
    near, distant, other = side("near"), side("distant"), side("other")
    (wrong,) = [url for url in other.worker.addresses if not url.startswith(UNIX)]
    (right,) = [url for url in distant.worker.addresses if not url.startswith(UNIX)]
    known = distant.worker
    worker = Worker(known.name, known.id, known.incarnation, (wrong, right))
    assert near.connections.connect(worker, soon()).peer.name == "distant"
    only_wrong = Worker(known.name, known.id, new_incarnation(), (wrong, wrong))
    with pytest.raises(LinkError, match="'other' is at this address, not 'distant'"):
        near.connections.connect(only_wrong, soon())
    restarted = Worker(known.name, known.id, new_incarnation(), (right,))
    with pytest.raises(LinkError, match="another incarnation"):
        near.connections.connect(restarted, soon())


def test_a_worker_answers_at_no_address_but_those_that_it_advertises(side: SideMaker) -> None:
    """Let a relay pass on to the worker connections that were dialled elsewhere."""
    near, distant = side("near"), side("distant")
    relay = Cutting(distant.worker.addresses[-1], 0, 0)
    known = distant.worker
    worker = Worker(known.name, known.id, known.incarnation, (relay.url,), known.host)
    try:
        with pytest.raises(LinkError, match="'distant' does not listen at tcp://"):
            near.connections.connect(worker, soon())
        assert near.connections.is_gone(worker, soon())  # it is not there
        assert near.connections.connect(through(relay, distant), soon()).started == 1
    finally:
        relay.close()


def test_a_process_that_does_not_show_that_it_is_of_the_group_is_refused(side: SideMaker) -> None:
    signer = SecretSigner(b"s")
    ours, other_group = (
        MembershipProof("farcall/open", signer),
        MembershipProof("farcall/0", signer),
    )
    distant, member = side("distant", vouch=ours.vouch), side("member")
    member.connections.me = shown = ours.shown_by(member.connections.me)
    assert member.connect(distant).started == 1
    thief = side("thief")
    me = thief.connections.me
    copied = msgspec.structs.replace(me, membership=shown.membership)
    for said in (me, other_group.shown_by(me), copied):
        thief.connections.me = said
        with pytest.raises(LinkError, match="no signed record of this group"):
            thief.connect(distant)


# Versions.


def test_versions_that_differ_are_one_warning_that_names_both(
    side: SideMaker, caplog: pytest.LogCaptureFixture
) -> None:
    near, distant, same = side("near"), side("distant"), side("same")
    for one, versions in ((near, "torch 2.13"), (distant, "torch 2.4"), (same, "torch 2.13")):
        one.connections.me = msgspec.structs.replace(one.connections.me, versions=versions)
    for _ in range(3):
        link = near.connect(distant)
        link.loss_cause = "the test"
        near.connections.removed(link)
        link.connection.sock.close()
    near.connect(same)
    near.close()
    distant.close()  # joins the threads of handshakes
    said = [record.message for record in caplog.records if " runs " in record.message]
    assert sorted(line.partition(":")[0] for line in said) == [
        "distant runs torch 2.4, but near runs torch 2.13",
        "near runs torch 2.13, but distant runs torch 2.4",
    ]


# Several callers dial the same worker.


def test_caller_without_time_is_not_told_of_another_one(side: SideMaker) -> None:
    near, distant = side("near"), side("distant")
    with pytest.raises(NotSent, match="no time to dial it"):
        near.connect(distant, 0.0)


def test_callers_with_deadlines_of_their_own_share_one_dialler(
    side: SideMaker, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, dialled, go_on = dialling.dial, threading.Event(), threading.Event()
    count = 0

    def dial_when_told(*args: Any) -> Any:
        nonlocal count
        count += 1
        dialled.set()
        assert go_on.wait(PATIENCE)
        return dial(*args)

    monkeypatch.setattr(dialling, "dial", dial_when_told)
    near, distant = side("near"), side("distant")
    links: queue.Queue[BareLink] = queue.Queue()
    threads.start(lambda: links.put(near.connect(distant)))
    assert dialled.wait(PATIENCE)
    with pytest.raises(NotSent, match="another call is still dialling"):
        near.connect(distant, time.monotonic() + 0.1)
    threads.start(lambda: links.put(near.connect(distant)))
    go_on.set()
    threads.join()
    assert links.get_nowait() is links.get_nowait()
    assert count == 1


@pytest.mark.parametrize("is_here", [True, False])
def test_few_workers_of_this_host_are_dialled_at_once(side: SideMaker, is_here: bool) -> None:
    """Dial all workers of other hosts at once, since some of these may be dark."""
    count = 3 * AT_ONCE
    inside = threading.Semaphore(0)
    may_end = threading.Event()

    def open_link(connection: Connection) -> BareLink:
        inside.release()
        may_end.wait(PATIENCE)
        return BareLink(connection)

    near = side("near", open_link)
    near.connections._turns = DialTurns(AT_ONCE, PATIENCE)  # none is given up on a slow machine
    host = "here" if is_here else ""
    workers = [msgspec.structs.replace(side(f"distant{n}").worker, host=host) for n in range(count)]
    callers = [
        threading.Thread(target=near.connections.connect, args=(worker, soon()))
        for worker in workers
    ]
    for one in callers:
        one.start()
    for _ in range(AT_ONCE if is_here else count):
        assert inside.acquire(timeout=PATIENCE)
    if is_here:
        while len(near.connections._turns._queue) < count - AT_ONCE:
            time.sleep(0.001)
        assert not inside.acquire(blocking=False)
    may_end.set()
    for one in callers:
        one.join(PATIENCE)
    assert len(near.connections.links()) == count


def test_caller_that_ends_lets_another_one_dial(
    side: SideMaker, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, dialled, go_on = dialling.dial, threading.Event(), threading.Event()

    def fail_at_first(*args: Any) -> Any:
        if not dialled.is_set():
            dialled.set()
            assert go_on.wait(PATIENCE)
            raise RuntimeError("no fault of the worker")
        return dial(*args)

    def fail() -> None:
        with pytest.raises(RuntimeError):
            near.connect(distant)

    monkeypatch.setattr(dialling, "dial", fail_at_first)
    near, distant = side("near"), side("distant")
    links: queue.Queue[BareLink] = queue.Queue()
    threads.start(fail)
    assert dialled.wait(PATIENCE)
    threads.start(lambda: links.put(near.connect(distant)))
    go_on.set()
    threads.join()
    assert links.get_nowait().started == 1


def test_dead_worker_is_dead_for_all_callers_that_wait(
    side: SideMaker, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled, go_on = threading.Event(), threading.Event()
    count = 0

    def refuse_when_told(url: str, *_: Any) -> None:
        nonlocal count
        count += 1
        dialled.set()
        assert go_on.wait(PATIENCE)

    def fail() -> None:
        with pytest.raises(LinkError, match="no process listens there"):
            near.connect(distant)

    monkeypatch.setattr(dialling, "dial", refuse_when_told)
    near, distant = side("near"), side("distant")
    threads.start(fail)
    assert dialled.wait(PATIENCE)
    dialler = near.connections._diallers[distant.worker.incarnation]
    threads.start(fail)
    while not dialler._machine._waiting:
        time.sleep(0.001)
    go_on.set()
    threads.join()
    assert count == len(distant.worker.addresses)
    assert near.connections._diallers == {}
