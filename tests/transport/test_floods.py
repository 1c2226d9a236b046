"""Any number of strangers keeps no member out, and leaves the program its descriptors.

The worker under attack is a process of its own, which may have few descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sides import BareLink, Side, SideMaker
from stations import PATIENCE, soon

from farcall.ids import Worker, new_incarnation, nth_incarnation
from farcall.transport.connect import dialling, guests, handshake, visitors
from farcall.transport.connect.conversation import Conversation, drive
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.guests import Guest
from farcall.transport.connect.handshake_messages import Identity, Unfinished
from farcall.transport.connect.knock import knock
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.multi_stream import StreamRegistry
from farcall.transport.connect.visitors import (
    HELLO_SECONDS,
    MOST_OF_ORIGIN,
    PROOF_SECONDS,
    SPARE_DESCRIPTORS,
    Visitor,
)

SECRET = bytes(range(32))
DESCRIPTORS = 96
FLOOD = 400
FILES = SPARE_DESCRIPTORS - 4  # that the program wants to open meanwhile

TARGET = f"""
import os, resource, sys
import msgspec
from farcall.transport.connect import visitors
from sides import BareLink, Side
visitors.HELLO_SECONDS = visitors.PROOF_SECONDS = {2 * PATIENCE}
secret = bytes.fromhex(sys.argv[1]) or None
side = Side("target", BareLink, secret=secret, listen=("127.0.0.1", 0))
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(sys.argv[2]))]
print(msgspec.json.encode(side.worker).decode(), flush=True)
for line in sys.stdin:
    opened = []
    try:
        while len(opened) < {FILES}:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print(len(opened), len(os.listdir("/proc/self/task")), flush=True)
    for one in opened:
        os.close(one)
side.close()
"""


class Target:
    """A worker in a process of its own, which no stranger leaves because its time is over."""

    def __init__(self, secret: bytes | None, kept: int) -> None:
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", TARGET, (secret or b"").hex(), str(kept)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.worker = msgspec.json.decode(self._line(), type=Worker)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self) -> tuple[int, int]:
        """Return how many files its program can open, and how many threads it has."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        opened, threads = map(int, self._line().split())
        return opened, threads

    def end(self) -> str:
        """Return what it has logged."""
        return self._process.communicate(timeout=PATIENCE)[1]


@pytest.fixture
def target() -> Iterator[Callable[..., Target]]:
    with contextlib.ExitStack() as stack:

        def make(secret: bytes | None = SECRET, kept: int = 0) -> Target:
            made = Target(secret, kept)
            stack.callback(made.end)
            return made

        yield make


BEGINNINGS = {
    "silent": b"",
    "half a hello": b"\x60\x00\x00\x00\xdc",
    "half a hello of TLS": b"\x16\x03\x01\x02\x00\x01",
}


MEMBER = knock(SECRET) + b"\x16\x03\x01\x02\x00\x01"  # as a member begins


def flood(
    url: str, beginning: bytes, stack: contextlib.ExitStack, count: int = FLOOD
) -> list[socket.socket]:
    made = []
    for _ in range(count):
        dialled = dialling.dial(url, PATIENCE, PATIENCE)
        assert dialled is not None
        made.append(stack.enter_context(dialled[0]))
        with contextlib.suppress(OSError):
            made[-1].sendall(beginning)
    return made


def joins(side: SideMaker, worker: Worker, secret: bytes | None, **options: Any) -> bool:
    """Connect as a member; strangers that have all the time they want may not hold it up."""
    near = side("near", secret=secret, **options)
    return near.connections.connect(worker, soon()).started == 1


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let strangers of this process have all the time they want: only others make them go."""
    for name in ("HELLO_SECONDS", "PROOF_SECONDS"):
        monkeypatch.setattr(visitors, name, 2 * PATIENCE)


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
@pytest.mark.parametrize("path", ["tcp", "unix"])
def test_member_connects_under_a_flood_and_files_can_be_opened(
    side: SideMaker, target: Callable[..., Target], path: str, secret: bytes | None, beginning: str
) -> None:
    attacked = target(secret)
    _, threads = attacked.ask()
    (url,) = [url for url in attacked.worker.addresses if url.startswith(path)]
    with contextlib.ExitStack() as stack:
        flood(url, BEGINNINGS[beginning], stack)
        assert joins(side, attacked.worker, secret, paths=(path,))
        opened, threads_then = attacked.ask()
    assert opened == FILES
    assert threads_then < threads + FLOOD // 10  # the member's, and those that are about to end


def test_member_gets_in_where_no_descriptor_is_left(
    side: SideMaker, target: Callable[..., Target]
) -> None:
    """Let the program itself hold nearly all descriptors before strangers come."""
    attacked = target(kept=DESCRIPTORS - 40)
    with contextlib.ExitStack() as stack:
        flood(attacked.worker.addresses[-1], b"", stack)
        assert joins(side, attacked.worker, SECRET)
        assert attacked.ask()[0] == FILES


@pytest.mark.usefixtures("endless")
def test_oldest_of_an_origin_goes_first(side: SideMaker) -> None:
    distant = side("distant", secret=SECRET)
    with contextlib.ExitStack() as stack:
        made = flood(distant.worker.addresses[-1], b"", stack)
        for sock in made[:-MOST_OF_ORIGIN]:
            sock.settimeout(PATIENCE)
            assert sock.recv(1) == b""
        for sock in made[-MOST_OF_ORIGIN:]:
            sock.settimeout(0)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


@pytest.mark.usefixtures("endless")
def test_strangers_do_not_push_out_a_peer_that_has_knocked(side: SideMaker) -> None:
    distant = side("distant", secret=SECRET)
    with contextlib.ExitStack() as stack:
        (member,) = flood(distant.worker.addresses[-1], MEMBER, stack, count=1)
        strangers = flood(distant.worker.addresses[-1], b"", stack)
        strangers[-MOST_OF_ORIGIN].settimeout(PATIENCE)
        assert strangers[-MOST_OF_ORIGIN].recv(1) == b""  # it went in the member's place
        member.settimeout(0)
        with pytest.raises(BlockingIOError):
            member.recv(1)


@pytest.mark.usefixtures("endless")
def test_connections_that_are_closed_at_once_push_no_peer_out(side: SideMaker) -> None:
    distant = side("distant", secret=SECRET)
    with contextlib.ExitStack() as stack:
        (slow,) = flood(distant.worker.addresses[-1], b"", stack, count=1)
        for _ in range(FLOOD):
            dialled = dialling.dial(distant.worker.addresses[-1], PATIENCE, PATIENCE)
            assert dialled is not None
            dialled[0].close()
        assert joins(side, distant.worker, SECRET)  # it comes after them
        slow.settimeout(0)
        with pytest.raises(BlockingIOError):
            slow.recv(1)


def test_flood_is_one_line_in_the_log(target: Callable[..., Target]) -> None:
    attacked = target()
    with contextlib.ExitStack() as stack:
        for sock in flood(attacked.worker.addresses[-1], b"GET / HTTP/1.1\r\n\r\n", stack):
            with contextlib.suppress(OSError):
                sock.recv(1)
    said = attacked.end()
    assert said.count("127.0.0.1") == 1, said


def how_long(sock: socket.socket, began: float) -> float:
    """Return for how many seconds the connection lives, which was made after `began`."""
    sock.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return time.monotonic() - began


BEFORE_HELLO = {
    "nothing": b"",
    "a length": b"\x60\0\0\0\xdc",
    "half a knock": knock(SECRET)[:9],
    "a knock": MEMBER,
}


@pytest.fixture(scope="module")
def lives() -> dict[str, float]:
    """Measure for how many seconds connections of strangers live, all of them at the same time."""
    distant, trusting = Side("distant", BareLink, secret=SECRET), Side("trusting", BareLink)
    with (
        contextlib.closing(distant),
        contextlib.closing(trusting),
        ThreadPoolExecutor(1 + len(BEFORE_HELLO)) as pool,
        contextlib.ExitStack() as stack,
    ):
        began = time.monotonic()
        measured = {"a hello": pool.submit(how_long, greeted(trusting.worker, stack), began)}
        for name, beginning in BEFORE_HELLO.items():
            began = time.monotonic()
            (sock,) = flood(distant.worker.addresses[-1], beginning, stack, count=1)
            measured[name] = pool.submit(how_long, sock, began)
        return {name: life.result() for name, life in measured.items()}


@pytest.mark.parametrize("beginning", BEFORE_HELLO)
def test_stranger_has_two_seconds_to_say_hello(lives: dict[str, float], beginning: str) -> None:
    assert lives[beginning] >= HELLO_SECONDS  # how much longer depends on the machine
    assert given(BEFORE_HELLO[beginning], Terms(SECRET)) == HELLO_SECONDS


def given(beginning: bytes, terms: Terms) -> float:
    """Return how many seconds the worker gives a stranger that has sent so much."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        me = Identity("distant", 1, new_incarnation())
        guest = Guest(me, terms, Listening(), StreamRegistry())
        visitor = Visitor(here, "somebody", "somewhere", guest, 10.0)
        there.sendall(beginning)
        visitor.advance()
        return visitor.until - 10.0


def said_by(worker: Identity) -> bytes:
    """Return a whole hello to any worker without a credential."""
    wanted = handshake.Wanted()
    return Conversation(lambda channel: handshake.greet(channel, worker, Terms(), wanted)).take()


def greeted(worker: Worker, stack: contextlib.ExitStack) -> socket.socket:
    """Return a connection without a credential that was admitted, and stays silent."""
    dialled = dialling.dial(worker.addresses[-1], PATIENCE, PATIENCE)
    assert dialled is not None
    me = Identity("stranger", 7, new_incarnation())
    wanted = handshake.Wanted(worker.incarnation)
    greeting = Conversation(lambda channel: handshake.greet(channel, me, Terms(), wanted))
    drive(dialled[0], greeting, soon())
    return stack.enter_context(dialled[0])


@pytest.mark.usefixtures("endless")
def test_strangers_who_need_prove_nothing_hold_no_thread(side: SideMaker) -> None:
    insecure = side("insecure")
    with contextlib.ExitStack() as stack:
        for _ in range(3 * MOST_OF_ORIGIN):
            greeted(insecure.worker, stack)
        until = soon()
        while names := handshakes_under_way():
            assert time.monotonic() < until, names
            time.sleep(0.01)
        assert joins(side, insecure.worker, None)


def handshakes_under_way() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("farcall-handshake-insecure")]


def test_stranger_who_need_prove_nothing_has_five_seconds(lives: dict[str, float]) -> None:
    assert lives["a hello"] >= PROOF_SECONDS
    assert given(said_by(Identity("stranger", 7, new_incarnation())), Terms()) == PROOF_SECONDS


@pytest.mark.usefixtures("endless")
def test_strangers_who_need_prove_nothing_do_not_hold_up_closing(side: SideMaker) -> None:
    insecure = side("insecure")
    with contextlib.ExitStack() as stack:
        strangers = [greeted(insecure.worker, stack) for _ in range(3)]
        insecure.close()
        for sock in strangers:
            assert how_long(sock, time.monotonic()) < PATIENCE


def test_time_that_admission_takes_is_not_the_strangers() -> None:
    here, there = socket.socketpair()
    with here, there:
        me = Identity("insecure", 1, new_incarnation())
        guest = Guest(me, Terms(), Listening(), StreamRegistry())
        visitor = Visitor(here, "somebody", "somewhere", guest, 10.0)
        before = visitor.until
        visitor.leave(11.0)
        visitor.come_back(111.0)
        assert visitor.until == before + 100.0


def link_of(me: Identity, to: Side, stack: contextlib.ExitStack) -> None:
    """Make a link as a worker of that identity, beside those that it has."""
    before = len(to.connections.links())
    dialled = dialling.dial(to.worker.addresses[-1], PATIENCE, PATIENCE)
    assert dialled is not None
    handshake.connect(stack.enter_context(dialled[0]), me, Terms(), expects=0, deadline=soon())
    until = soon()
    while len(to.connections.links()) == before:
        assert time.monotonic() < until


def test_member_has_a_bounded_number_of_links(side: SideMaker) -> None:
    distant, me = side("distant"), Identity("near", 7, new_incarnation())
    with contextlib.ExitStack() as stack:
        for _ in range(guests.MOST_LINKS):
            link_of(me, distant, stack)
        again = msgspec.structs.replace(me, incarnation=nth_incarnation(me.incarnation, 1))
        for one in (me, again):
            with pytest.raises(Unfinished):
                link_of(one, distant, stack)
        link_of(Identity("other", 8, new_incarnation()), distant, stack)


def test_members_leave_descriptors_to_the_program(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    distant = side("distant")
    with contextlib.ExitStack() as stack:
        link_of(Identity("near", 7, new_incarnation()), distant, stack)
        highest = max(link.connection.sock.fileno() for link in distant.connections.links())
        monkeypatch.setattr(guests, "descriptor_limit", lambda: highest + guests.SPARE_OF_LINKS)
        with pytest.raises(Unfinished):
            link_of(Identity("other", 8, new_incarnation()), distant, stack)
