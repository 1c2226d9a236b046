"""Unix sockets: workers of one host use them, and nothing that is wrong with them does harm."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from descriptors import check_no_descriptors_left
from stations import SocketNet, Station, Threads, echo, request, soon

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.ids import Worker
from farcall.transport.base import Link
from farcall.transport.connect import addresses
from farcall.transport.connect.addresses import UNIX

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")

StationMaker = Callable[..., Station]


@pytest.fixture
def kind(unix_network: SocketNet) -> str:
    """Return the beginning of the descriptions of links."""
    return "shm" if "shm" in unix_network.options.get("paths", ()) else "unix"


@pytest.fixture
def station(unix_network: SocketNet) -> Iterator[StationMaker]:
    with ExitStack() as stack:

        def make(name: str, **options: Any) -> Station:
            made = unix_network.station(name, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def far(station: StationMaker) -> Station:
    made = station("far")
    made.read(echo)
    return made


@pytest.fixture
def impostor() -> Iterator[socket.socket]:
    """Listen on a Unix name as another user's program would.

    The name is not like those of workers, to which `farcall status` of another test would connect.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0impostor-{secrets.token_hex(16)}".encode())
        listener.listen(0)
        yield listener


def url_of(listener: socket.socket) -> str:
    return UNIX + listener.getsockname()[1:].decode()


def by_tcp(worker: Worker, unix: str) -> Worker:
    """Return the worker with another Unix address, and its own TCP address."""
    _, tcp = worker.addresses
    return Worker(worker.name, worker.id, worker.incarnation, (unix, tcp), worker.host)


def names() -> str:
    return Path("/proc/net/unix").read_text()


def forbid(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let a method fail for Unix sockets, as a sandbox does."""
    allowed = getattr(socket.socket, method)

    def guarded(sock: socket.socket, address: Any) -> None:
        if sock.family == socket.AF_UNIX:
            raise PermissionError(1, "Operation not permitted")
        allowed(sock, address)

    monkeypatch.setattr(socket.socket, method, guarded)


def works(link: Link) -> bool:
    return link.exchange(request(1, b"body"), soon()).body == b"body"


# Which way is taken.


def test_workers_of_one_host_are_linked_within_it(near: Station, far: Station, kind: str) -> None:
    link = near.connect(far)
    assert works(link)
    (back,) = far.endpoint.links()
    us = f"pid {os.getpid()} (uid {os.getuid()})"
    assert (link.description, back.description) == (f"{kind} {us}", f"{kind} from {us}")


def test_unix_address_comes_first_and_tcp_stays(near: Station) -> None:
    unix, tcp = near.worker.addresses
    assert unix.startswith("unix:@farcall-")
    assert tcp.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("name", ["farcall-of-another-host", "x" * 200, "", "\0"])
def test_name_that_leads_nowhere_is_followed_by_tcp(near: Station, far: Station, name: str) -> None:
    link = near.endpoint.connect(by_tcp(far.worker, UNIX + name), soon())
    assert works(link)
    assert link.description.startswith("tcp 127.0.0.1:")


@pytest.mark.parametrize("url", ["unix:/run/farcall", "unix://@farcall-1", "unix:"])
def test_unix_address_of_another_form_is_left_out(near: Station, far: Station, url: str) -> None:
    assert works(near.endpoint.connect(by_tcp(far.worker, url), soon()))


def test_full_backlog_is_not_waited_for(
    near: Station, far: Station, impostor: socket.socket
) -> None:
    with ExitStack() as stack:
        for _ in range(2):  # a backlog of 0 holds one
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            try:
                sock.connect(impostor.getsockname())
            except BlockingIOError:
                break
        else:
            raise AssertionError("the backlog has no end")
        link = near.endpoint.connect(by_tcp(far.worker, url_of(impostor)), soon())
    assert works(link)


def test_connecting_that_is_forbidden_is_followed_by_tcp(
    near: Station, far: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, "connect")
    assert works(near.connect(far))


def test_name_on_this_host_is_not_tried_for_a_worker_of_another(
    station: StationMaker, far: Station, impostor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dial no Unix name here: any process that has seen the name could listen on it."""
    # There is nothing but loopback here.
    monkeypatch.setattr(addresses, "is_loopback_name", lambda _: False)
    claimed = by_tcp(far.worker, url_of(impostor))
    there = Worker(claimed.name, claimed.id, claimed.incarnation, claimed.addresses, "there")
    near = station("near", host="here")
    assert near.endpoint.connect(there, soon()).description.startswith("tcp ")
    impostor.setblocking(False)
    with pytest.raises(BlockingIOError):
        impostor.accept()


def test_endpoint_does_without_where_there_are_no_unix_sockets(
    station: StationMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with check_no_descriptors_left():
        with monkeypatch.context() as patched:
            forbid(patched, "bind")
            only_tcp = station("only-tcp")
        assert [url.partition(":")[0] for url in only_tcp.worker.addresses] == ["tcp"]
        only_tcp.read(echo)
        near = station("near")
        assert works(near.connect(only_tcp))
        only_tcp.close()
        near.close()


# Refusals.


def test_worker_that_is_gone_is_described_by_its_tcp_address(near: Station, far: Station) -> None:
    far.close()
    unix, tcp = far.worker.addresses
    with pytest.raises(LinkError) as raised:
        near.connect(far)
    assert str(raised.value) == (
        f"can't reach worker 'far': {unix}: no process listens there; {tcp}: [Errno 111] "
        "Connection refused"
    )


def test_worker_that_has_only_a_unix_address_and_is_gone(near: Station, far: Station) -> None:
    far.close()
    known = far.worker
    worker = Worker(known.name, known.id, known.incarnation, known.addresses[:1])
    with pytest.raises(LinkError, match=r"'far': unix:@.*: no process listens there"):
        near.endpoint.connect(worker, soon())


def test_wrong_secret_is_told_over_a_unix_socket(station: StationMaker, near: Station) -> None:
    far = station("far", secret=b"secret")
    with pytest.raises(AuthenticationFailed, match="FARCALL_SECRET"):
        near.connect(far)
    assert far.endpoint.links() == []


def test_impostor_on_the_name_is_no_worker(
    station: StationMaker, far: Station, impostor: socket.socket, threads: Threads
) -> None:
    near = station("near", secret=b"secret")

    def answer() -> None:
        sock, _ = impostor.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threads.start(answer)
    with pytest.raises(BadFrame, match="not farcall"):
        near.endpoint.connect(by_tcp(far.worker, url_of(impostor)), soon())
    assert near.endpoint.links() == []


# Leftovers.


def test_name_is_gone_with_the_endpoint(near: Station, far: Station) -> None:
    assert works(near.connect(far))
    name = far.worker.addresses[0].removeprefix("unix:")
    assert name in names()
    far.close()
    near.close()
    assert name not in names()


def test_name_is_free_when_the_worker_was_forked_and_its_child_lives(far: Station) -> None:
    name = far.worker.addresses[0].removeprefix("unix:")
    reader, writer = os.pipe()
    forgotten, tell = os.pipe()
    child = os.fork()
    if not child:
        far.endpoint.close_after_fork()
        os.write(tell, b"\0")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(forgotten, 1)
        far.close()
        assert name not in names()
    finally:
        os.write(writer, b"\0")
        _, status = os.waitpid(child, 0)
        for fd in (reader, writer, forgotten, tell):
            os.close(fd)
    assert status == 0


def test_parent_is_reached_after_its_child_has_forgotten(near: Station, far: Station) -> None:
    child = os.fork()
    if not child:
        far.endpoint.close_after_fork()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert works(near.connect(far))


def test_nothing_listens_when_the_tcp_address_is_taken(unix_network: SocketNet) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        check_no_descriptors_left(),
        pytest.raises(LinkError, match="can't listen"),
    ):
        unix_network.station(listen=("127.0.0.1", other.getsockname()[1]))


def test_workers_dial_both_kinds_of_address_at_once(
    station: StationMaker, far: Station, threads: Threads, kind: str
) -> None:
    unix, tcp = far.worker.addresses
    guests = [station(f"guest{number}") for number in range(16)]

    def visit(guest: Station, url: str) -> None:
        known = far.worker
        worker = Worker(known.name, known.id, known.incarnation, (url,))
        guest.read()
        for _ in range(5):
            link = guest.endpoint.connect(worker, soon())
            assert link.description.startswith(kind if url == unix else "tcp")
            assert works(link)
            guest.endpoint.drop(known.incarnation, "again")

    for number, guest in enumerate(guests):
        threads.start(visit, guest, unix if number % 2 else tcp)
    threads.join()
