"""The presence of a worker where it listened: the kind of answer decides, not that there is one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from sides import SideMaker
from stations import LIMITS, PATIENCE, soon

from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.plain import encode_msgpack
from farcall.transport.connect import addresses, dialling, presence
from farcall.transport.connect.handshake_messages import LENGTH, Refuse

Connected = Callable[[socket.socket], None]


def serve(stack: ExitStack, listener: socket.socket, talk: Connected) -> None:
    """Do that with each connection, in a thread that ends with the stack."""

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            stack.callback(sock.close)
            with contextlib.suppress(OSError):  # the other side may have left
                talk(sock)

    thread = threading.Thread(target=accept)
    thread.start()
    stack.callback(thread.join, PATIENCE)
    stack.callback(listener.shutdown, socket.SHUT_RDWR)


@pytest.fixture
def stranger() -> Iterator[Callable[[Connected], str]]:
    """Listens at an address, and does that with each connection."""
    with ExitStack() as stack:

        def listen(talk: Connected) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            serve(stack, listener, talk)
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def at(worker: Worker, *addresses: str) -> Worker:
    return msgspec.structs.replace(worker, addresses=addresses)


def looks(side: SideMaker, worker: Worker, deadline: float | None = None, **options: Any) -> bool:
    near = side("near", **options)
    return near.connections.is_gone(worker, soon() if deadline is None else deadline)


@pytest.mark.parametrize("secret", [None, b"s"])
def test_a_worker_that_listens_is_there_and_gets_no_link_by_that(
    side: SideMaker, secret: bytes | None
) -> None:
    distant = side("distant", secret=secret)
    assert not looks(side, distant.worker, secret=secret)
    assert distant.connections.links() == []


@pytest.mark.parametrize("kind", [0, -1])
def test_a_worker_that_listens_at_one_address_only_is_there(side: SideMaker, kind: int) -> None:
    distant = side("distant")
    kept = distant.worker.addresses[kind]
    assert not looks(side, at(distant.worker, "tcp://127.0.0.1:1", kept))


def test_a_worker_that_refuses_us_is_there_where_we_have_no_credential(side: SideMaker) -> None:
    distant = side("distant", secret=b"s")
    assert not looks(side, distant.worker)


@pytest.mark.parametrize("theirs", [None, b"t"])
@pytest.mark.parametrize("kind", [0, -1])
def test_process_that_can_not_show_our_credential_is_no_worker_of_ours(
    side: SideMaker, theirs: bytes | None, kind: int
) -> None:
    """Have the worker's address, name and incarnation, but another credential."""
    distant = side("distant", secret=theirs)
    assert looks(side, at(distant.worker, distant.worker.addresses[kind]), secret=b"s")


def test_a_worker_that_shows_our_credential_and_refuses_us_is_there(side: SideMaker) -> None:
    distant = side("distant", secret=b"s", encrypt=False)
    assert not looks(side, at(distant.worker, distant.worker.addresses[-1]), secret=b"s")


def test_a_worker_that_does_not_admit_us_is_there(side: SideMaker) -> None:
    distant = side("distant", admit=lambda *_: "not you")
    assert not looks(side, distant.worker)


def test_a_worker_that_has_ended_is_gone(side: SideMaker) -> None:
    distant = side("distant")
    distant.close()
    assert looks(side, distant.worker)


@pytest.mark.parametrize("secret", [None, b"s"])
def test_a_worker_is_gone_where_another_one_listens(side: SideMaker, secret: bytes | None) -> None:
    other = side("other", secret=secret)
    former = msgspec.structs.replace(other.worker, incarnation=new_incarnation())
    assert looks(side, former, secret=secret)


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH\r\n", b"\0" * 64, b"\xff" * 4])
def test_a_worker_is_gone_where_something_else_listens(
    side: SideMaker, stranger: Callable[[Connected], str], banner: bytes
) -> None:
    worker = side("distant").worker
    assert looks(side, at(worker, stranger(lambda sock: sock.sendall(banner))))


def test_a_worker_is_gone_whose_port_leads_to_the_asker(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reach the socket itself: the system may give it the port that it connects to as its own."""

    def reach_itself(*_: Any) -> tuple[socket.socket, str]:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock, "tcp"

    worker = side("distant").worker
    monkeypatch.setattr(dialling, "dial", reach_itself)
    assert looks(side, worker)


def test_a_process_that_listens_in_silence_may_be_the_worker(
    side: SideMaker, stranger: Callable[[Connected], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "PROBE_SECONDS", 0.1)
    worker = side("distant").worker
    assert not looks(side, at(worker, stranger(lambda _: None)), dead_host_timeout=0.01)


def test_a_process_that_hangs_up_is_asked_again(
    side: SideMaker, stranger: Callable[[Connected], str]
) -> None:
    """Ask again after a hang-up: a worker that ends, or has no descriptor to spare, hangs up."""
    distant = side("distant")
    begun = threading.Event()

    def hang_up(sock: socket.socket) -> None:
        if begun.is_set():
            distant.close()
        begun.set()
        sock.close()

    def until_it_ends() -> str:
        return stranger(hang_up)

    worker = at(distant.worker, until_it_ends())
    for seconds in LIMITS:
        assert not looks(side, worker, time.monotonic() + seconds)
        if begun.is_set():
            break
    assert begun.is_set()


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_a_worker_whose_host_is_silent_for_long_is_gone(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    worker = side("distant").worker
    monkeypatch.setattr(dialling, "dial", fail)
    assert looks(side, worker, dead_host_timeout=0.2)
    assert not looks(side, worker, time.monotonic() + 0.2, dead_host_timeout=PATIENCE)
    assert not looks(side, worker, time.monotonic() + 0.2, dead_host_timeout=0.0)


@pytest.mark.parametrize("number", sorted(dialling.OF_THIS_MACHINE))
def test_a_shortage_of_this_machine_says_nothing_of_the_worker(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    worker = side("distant").worker
    monkeypatch.setattr(dialling, "dial", fail)
    assert not looks(side, worker, time.monotonic() + 0.2, dead_host_timeout=0.05)


def test_a_worker_that_may_not_be_dialled_counts_as_there(side: SideMaker) -> None:
    worker = side("distant").worker
    assert not looks(side, at(worker))
    assert not looks(side, at(worker, "gloo://0"))
    elsewhere = msgspec.structs.replace(worker, host="elsewhere", addresses=("tcp://10.0.0.1:1",))
    assert not looks(side, elsewhere, confined=True)


needs_unix = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")
HOST = "here/boot/net:[1]"  # as `host_id` says it


@pytest.fixture
def taken() -> Iterator[Callable[[Connected], str]]:
    """Takes a Unix name, and does that with each connection, in this process."""
    with ExitStack() as stack:

        def listen(talk: Connected) -> str:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            name = f"impostor-{secrets.token_hex(16)}"  # not like a worker's: see test_unix.py
            listener.bind(f"\0{name}")
            listener.listen()
            serve(stack, listener, talk)
            return f"unix:@{name}"

        yield listen


def say_nothing(_: socket.socket) -> None:
    pass


def refuse(sock: socket.socket) -> None:
    refusal = encode_msgpack(Refuse("not you", "link"))
    sock.sendall(LENGTH.pack(len(refusal)) + refusal)


@needs_unix
@pytest.mark.parametrize("secret", [None, b"s"])
@pytest.mark.parametrize("talk", [say_nothing, refuse, socket.socket.close])
def test_another_process_at_the_name_of_a_worker_is_not_the_worker(
    side: SideMaker, taken: Callable[[Connected], str], talk: Connected, secret: bytes | None
) -> None:
    worker = msgspec.structs.replace(side("distant").worker, pid=os.getppid())
    assert looks(side, at(worker, taken(talk)), secret=secret)


@needs_unix
@pytest.mark.parametrize("pid", [0, os.getpid()], ids=["unknown", "its own"])
def test_silence_of_the_process_that_may_be_the_worker_proves_nothing(
    side: SideMaker, taken: Callable[[Connected], str], pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "PROBE_SECONDS", 0.1)
    worker = msgspec.structs.replace(side("distant").worker, pid=pid)
    assert not looks(side, at(worker, taken(say_nothing)))


@needs_unix
@pytest.mark.parametrize(
    ("here", "there", "is_gone"),
    [(HOST, HOST, True), (HOST, "else/boot/net:[1]", False), ("here/1234", "here/1234", False)],
    ids=["same network", "another one", "networks are not known"],
)
def test_silence_at_a_port_does_not_stand_for_a_worker_whose_name_is_free(
    side: SideMaker,
    stranger: Callable[[Connected], str],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str,
    is_gone: bool,
) -> None:
    monkeypatch.setattr(presence, "PROBE_SECONDS", 0.1)
    distant = side("distant")
    distant.close()
    name = distant.worker.addresses[0]
    worker = msgspec.structs.replace(at(distant.worker, name, stranger(say_nothing)), host=there)
    near = side("near")
    near.connections.me = msgspec.structs.replace(near.connections.me, host=here)
    assert near.connections.is_gone(worker, soon()) is is_gone


@needs_unix
def test_link_is_made_with_no_other_process_than_the_workers(side: SideMaker) -> None:
    distant, near = side("distant"), side("near")
    name = distant.worker.addresses[0]
    other = msgspec.structs.replace(at(distant.worker, name), pid=os.getppid())
    with pytest.raises(LinkError, match=rf"pid {os.getpid()} listens there, not the worker"):
        near.connections.connect(other, soon())
    own = msgspec.structs.replace(other, pid=os.getpid())
    assert near.connections.connect(own, soon()).peer.name == "distant"


@needs_unix
def test_pid_of_a_process_is_counted_in_its_own_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = addresses._pid_in_its_namespace
    assert inner(os.getpid()) == os.getpid()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert inner(done.pid) == 0  # there is none
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert inner(os.getpid()) is None  # what /proc has is of another namespace
