"""Shared memory: a received buffer lies over the sender's segment, and is the receiver's alone
until it is collected; then the segment serves again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stations import Station, Threads, request, soon

from farcall.transport.base import Link, NotSent

StationMaker = Callable[..., Station]
SIZE = 64 << 10


@pytest.fixture
def near(shm_station: StationMaker) -> Station:
    made = shm_station("near")
    made.read()
    return made


@pytest.fixture
def far(shm_station: StationMaker) -> Station:
    return shm_station("far")


@pytest.fixture
def link(near: Station, far: Station) -> Link:
    far.read()
    return near.connect(far)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def mappings() -> list[range]:
    """Addresses of this process that lie over farcall's shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "memfd:farcall" in line)
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def arrives(link: Link, far: Station, data: bytes) -> memoryview:
    """Return a buffer as it arrives."""
    link.send(request(1, b"", [data]), soon())
    (view,) = far.arrived().frame.buffers
    assert isinstance(view, memoryview)
    assert view.nbytes == len(data)
    return view


def test_received_buffer_lies_over_the_segment(link: Link, far: Station) -> None:
    view = arrives(link, far, b"x" * SIZE)
    assert any(address(view) in span for span in mappings())
    assert view.tobytes() == b"x" * SIZE


def test_writing_to_a_received_buffer_changes_nothing_elsewhere(link: Link, far: Station) -> None:
    data = bytearray(b"x" * SIZE)
    view = arrives(link, far, data)
    assert not view.readonly
    view[:] = b"y" * SIZE
    assert data == b"x" * SIZE
    other = arrives(link, far, data)
    assert other.tobytes() == b"x" * SIZE
    assert view.tobytes() == b"y" * SIZE


def test_segment_serves_again_when_the_buffer_is_collected(link: Link, far: Station) -> None:
    first = arrives(link, far, b"1" * SIZE)
    place = address(first)
    second = arrives(link, far, b"2" * SIZE)
    assert address(second) != place  # the first is still there
    del first
    gc.collect()
    third = arrives(link, far, b"3" * SIZE)
    assert address(third) == place
    assert second.tobytes() == b"2" * SIZE


def test_view_of_a_buffer_keeps_its_segment(link: Link, far: Station) -> None:
    first = arrives(link, far, b"1" * SIZE)
    place = address(first)
    part = first[100:200]
    del first
    gc.collect()
    assert address(arrives(link, far, b"2" * SIZE)) != place
    assert part.tobytes() == b"1" * 100


def test_buffer_may_be_collected_in_any_thread(link: Link, far: Station) -> None:
    kept = [arrives(link, far, b"1" * SIZE)]
    place = address(kept[0])
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert address(arrives(link, far, b"2" * SIZE)) == place


def test_thousands_of_kept_buffers_keep_their_contents(link: Link, far: Station) -> None:
    kept = [arrives(link, far, number.to_bytes(4) * (SIZE // 4)) for number in range(3000)]
    wrong = [n for n, view in enumerate(kept) if view.tobytes() != n.to_bytes(4) * (SIZE // 4)]
    assert wrong == []
    # A replay buffer: the oldest make place for new ones.
    for number in range(3000, 4000):
        kept[number % 3000] = arrives(link, far, number.to_bytes(4) * (SIZE // 4))
    for number in range(1000, 4000):
        view = kept[number % 3000]
        assert view[:4] == view[-4:] == number.to_bytes(4), number


def test_buffers_outlive_their_link_and_then_nothing_is_mapped(near: Station, far: Station) -> None:
    far.read()
    gc.collect()  # what other tests have left, in this process, stays out of it
    before = mappings()
    link = near.connect(far)
    kept = [arrives(link, far, bytes([number]) * SIZE) for number in range(10)]
    near.close()
    far.next_loss()
    far.close()
    del link
    assert [view[-1] for view in kept] == list(range(10))
    kept.clear()
    near.events.queue.clear()
    gc.collect()
    assert [span for span in mappings() if span not in before] == []


def test_forked_child_gives_back_nothing_of_its_parent(link: Link, far: Station) -> None:
    kept = [arrives(link, far, b"1" * SIZE) for _ in range(3)]
    child = os.fork()
    if not child:
        far.endpoint.close_after_fork()
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    others = [arrives(link, far, b"2" * SIZE) for _ in range(3)]
    assert not {address(view) for view in kept} & {address(view) for view in others}
    assert all(view.tobytes() == b"1" * SIZE for view in kept)


# Back-pressure.

CHUNK = bytes(64 << 20)
CHUNKS = (1 << 30) // len(CHUNK)  # on their way to a peer that does not read: a gigabyte


def test_peer_that_does_not_read_is_sent_no_more_than_a_gigabyte(
    near: Station, far: Station, shm_station: StationMaker, threads: Threads
) -> None:
    link = near.connect(far)
    for number in range(CHUNKS):
        link.send(request(number, b"", [CHUNK]), soon())
    with pytest.raises(NotSent):
        link.send(request(0, b"", [CHUNK]), time.monotonic() + 0.2)
    link.send(request(CHUNKS), soon())  # what needs no segment still goes
    other = shm_station("other")
    other.read()
    near.connect(other).send(request(7, b"", [b"x" * SIZE]), soon())
    assert other.arrived().frame.call_id == 7
    late = range(CHUNKS + 1, CHUNKS + 4)
    for number in late:
        threads.start(link.send, request(number, b"", [CHUNK]), soon())
    far.read()
    assert [far.arrived().frame.call_id for _ in range(CHUNKS + 1)] == list(range(CHUNKS + 1))
    assert {far.arrived().frame.call_id for _ in late} == set(late)
