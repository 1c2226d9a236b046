"""Sockets: file descriptors are given back, and one that is used again is not mistaken."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from stations import SocketNet, Station, Threads, dial, echo, request, soon

from farcall.ids import Worker
from farcall.transport.poller import new_poller
from farcall.transport.socket_link import SocketLink
from farcall.transport.spin import SpinBudget
from farcall.wire import DEFAULT_LIMITS

StationMaker = Callable[..., Station]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_hundreds_of_links_leave_no_descriptor_open(socket_station: StationMaker) -> None:
    near, far = socket_station("near"), socket_station("far")
    near.read()
    far.read(echo)
    near.connect(far).exchange(request(1), soon())
    before = open_descriptors()
    for number in range(2, 300):
        near.endpoint.drop(far.worker.incarnation, "again")
        near.lost()
        assert near.connect(far).exchange(request(number), soon()).call_id == number
        far.lost()
    # The sockets of the last lost links are closed at the next turn of `next`.
    for one in (near, far):
        one.stop_reading()
        one.endpoint.next(0.0)
    assert open_descriptors() <= before


def test_endpoints_leave_no_descriptor_open() -> None:
    net = SocketNet()
    before = open_descriptors()
    for _ in range(40):
        near, far = net.station(), net.station()
        near.read()
        far.read(echo)
        near.connect(far).exchange(request(1), soon())
        near.close()
        far.close()
    assert open_descriptors() == before


def test_refused_connections_leave_no_descriptor_open(socket_station: StationMaker) -> None:
    far = socket_station("far")
    before = open_descriptors()
    for _ in range(100):
        # Suppressed: it ends the connection as soon as it can.
        with dial(far) as sock, contextlib.suppress(OSError):
            sock.sendall(b"x" * 64)
            while sock.recv(4096):
                pass
    far.close()  # joins the threads that close them
    assert open_descriptors() <= before


def test_threads_end_with_their_endpoint() -> None:
    before = set(threading.enumerate())
    net = SocketNet()
    near, far = net.station(), net.station()
    near.read()
    far.read(echo)
    near.connect(far).exchange(request(1), soon())
    near.close()
    far.close()
    assert set(threading.enumerate()) <= before


def test_descriptor_that_is_used_again_belongs_to_its_new_link(
    socket_station: StationMaker, threads: Threads
) -> None:
    """Links come and go while threads call on them: every outcome is the call's own."""
    hub = socket_station("hub")
    hub.read(echo)
    guests = [socket_station(f"guest{number}") for number in range(4)]

    def visit(guest: Station, mark: int) -> None:
        guest.read()
        for number in range(60):
            call_id = mark << 32 | number + 1
            body = b"%d" % call_id
            try:
                answer = guest.connect(hub).exchange(request(call_id, body), soon())
            except ConnectionError:
                continue  # dropped by the hub just now
            assert (answer.call_id, answer.body) == (call_id, body)
            if number % 5 == mark % 5:
                guest.endpoint.drop(hub.worker.incarnation, "again")

    for mark, guest in enumerate(guests):
        threads.start(visit, guest, mark)
    for _ in range(40):
        for guest in guests:
            hub.endpoint.drop(guest.worker.incarnation, "from the hub")
    threads.join()


def test_link_that_is_lost_before_it_starts_leaves_its_closed_descriptor_alone() -> None:
    poller = new_poller()
    lost: list[str] = []
    near, far = socket.socketpair()
    peer = Worker("far", 1, 1)
    link = SocketLink(
        near,
        peer,
        "pair",
        poller,
        SpinBudget(0),
        DEFAULT_LIMITS,
        on_frame=lambda link, frame: None,
        on_lost=lambda link, cause: lost.append(cause),
    )
    link.lose("the peer was dropped meanwhile")
    assert link.free()  # by the endpoint's `next`
    link.start()
    assert lost == ["the peer was dropped meanwhile"]
    assert poller.wait(0.0) == []
    far.close()
    poller.close()
