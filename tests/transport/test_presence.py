"""The presence of a worker where it listened: the kind of answer decides, not that there is one."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from sides import SideMaker
from stations import PATIENCE, soon

from farcall.ids import Worker, new_incarnation
from farcall.transport.connect import dialling, presence

Connected = Callable[[socket.socket], None]


@pytest.fixture
def stranger() -> Iterator[Callable[[Connected], str]]:
    """Listens at an address, and does that with each connection."""
    with ExitStack() as stack:

        def listen(talk: Connected) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                while True:
                    try:
                        sock, _ = listener.accept()
                    except OSError:
                        return
                    stack.callback(sock.close)
                    talk(sock)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join, PATIENCE)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
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


@pytest.mark.parametrize(("ours", "theirs"), [(None, b"s"), (b"s", None), (b"s", b"t")])
def test_a_worker_that_refuses_us_is_there(
    side: SideMaker, ours: bytes | None, theirs: bytes | None
) -> None:
    distant = side("distant", secret=theirs)
    assert not looks(side, distant.worker, secret=ours)


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


def test_a_worker_is_gone_whose_port_reaches_who_asks(
    side: SideMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may give a socket the port that it connects to, as that of its own end."""

    def reach_itself(*_: Any) -> tuple[socket.socket, str]:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock, "tcp"

    worker = side("distant").worker
    monkeypatch.setattr(dialling, "dial", reach_itself)
    assert looks(side, worker)


def test_whoever_listens_in_silence_may_be_the_worker(
    side: SideMaker, stranger: Callable[[Connected], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "PROBE_SECONDS", 0.1)
    worker = side("distant").worker
    assert not looks(side, at(worker, stranger(lambda _: None)), dead_host_timeout=0.01)


def test_whoever_hangs_up_is_asked_again(
    side: SideMaker, stranger: Callable[[Connected], str]
) -> None:
    """A worker that ends, or has no descriptor to spare, does that."""
    distant = side("distant")
    begun = threading.Event()

    def hang_up(sock: socket.socket) -> None:
        if begun.is_set():
            distant.close()
        begun.set()
        sock.close()

    def until_it_ends() -> str:
        return stranger(hang_up)

    assert not looks(side, at(distant.worker, until_it_ends()), time.monotonic() + 0.2)
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
def test_what_this_machine_lacks_says_nothing_of_the_worker(
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
