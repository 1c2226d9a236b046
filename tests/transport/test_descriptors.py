"""File descriptors are given back, and one that is used again is not mistaken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from descriptors import check_no_descriptors_left
from stations import Net, Station, Threads, dial, echo, request, soon
from threads_left import check_no_threads_left

from farcall.errors import LinkError
from farcall.transport.base import Arrived

StationMaker = Callable[..., Station]


def test_hundreds_of_links_leave_no_descriptor_open(networked_station: StationMaker) -> None:
    near, far = networked_station("near"), networked_station("far")
    near.read()
    far.read(echo)
    near.connect(far).exchange(request(1), soon())

    def close_sockets_of_lost_links() -> None:
        for one in (near, far):
            one.endpoint.next(0.0)

    with check_no_descriptors_left(close_sockets_of_lost_links):
        for number in range(2, 300):
            near.endpoint.drop(far.worker.incarnation, "again")
            near.next_loss()
            assert near.connect(far).exchange(request(number), soon()).call_id == number
            far.next_loss()
        for one in (near, far):
            one.stop_reading()


def test_endpoints_leave_no_descriptor_open(network: Net) -> None:
    with check_no_descriptors_left():
        for _ in range(40):
            near, far = network.station(), network.station()
            near.read()
            far.read(echo)
            near.connect(far).exchange(request(1), soon())
            near.close()
            far.close()


def test_links_that_come_too_late_leave_no_descriptor_open(network: Net) -> None:
    with check_no_descriptors_left():
        near, far = network.station(), network.station()
        far.read()
        near.close()
        for _ in range(10):
            with pytest.raises(LinkError, match="shut down"):
                near.connect(far)
            far.next_loss()
        far.close()


def test_refused_connections_leave_no_descriptor_open(networked_station: StationMaker) -> None:
    far = networked_station("far")
    with check_no_descriptors_left():
        for _ in range(100):
            # Suppressed: it ends the connection as soon as it can.
            with dial(far) as sock, contextlib.suppress(OSError):
                sock.sendall(b"x" * 64)
                while sock.recv(4096):
                    pass
        far.close()


def test_threads_end_with_their_endpoint(network: Net) -> None:
    with check_no_threads_left():
        near, far = network.station("near"), network.station("far")
        near.read()
        far.read(echo)
        near.connect(far).exchange(request(1), soon())
        near.close()
        far.close()


def test_descriptor_that_is_used_again_belongs_to_its_new_link(
    networked_station: StationMaker, threads: Threads
) -> None:
    """Links come and go while threads call on them: every outcome is the call's own."""

    def echo_to_who_is_there(event: Arrived) -> None:
        with contextlib.suppress(LinkError):  # dropped just now
            echo(event)

    hub = networked_station("hub")
    hub.read(echo_to_who_is_there)
    guests = [networked_station(f"guest{number}") for number in range(4)]

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
