"""Both pollers: sockets come and go while a thread waits, and nothing is reported for another."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest
from descriptors import check_no_descriptors_left
from stations import PATIENCE, use_selector_poller

from farcall.transport.sockets import poller as module
from farcall.transport.sockets.poller import EpollPoller, Poller, SelectorPoller

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[EpollPoller, SelectorPoller])
def poller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Poller]:
    if request.param is SelectorPoller:
        use_selector_poller(monkeypatch)
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def waited(poller: Poller, timeout: float = PATIENCE) -> list[tuple[str, int]]:
    """Return the ready ones; look again after a wake-up, which a change may be."""
    for _ in range(5):
        ready = [found for found in poller.wait(timeout) if found != module.WOKEN]
        if ready:
            return ready
    return []


def test_ready_socket_is_reported_with_its_token(poller: Poller, pair: Pair) -> None:
    one, other = pair
    poller.add(one.fileno(), "one", module.READ)
    assert waited(poller, 0.0) == []
    other.send(b"x")
    assert waited(poller) == [("one", module.READ)]
    assert waited(poller) == [("one", module.READ)]  # as long as it is unread
    one.recv(1)
    assert waited(poller, 0.0) == []


def test_socket_is_waited_for_as_asked(poller: Poller, pair: Pair) -> None:
    one, other = pair
    other.send(b"x")
    poller.add(one.fileno(), "one", module.WRITE)
    assert waited(poller) == [("one", module.WRITE)]
    poller.modify(one.fileno(), module.READ | module.WRITE)
    assert waited(poller) == [("one", module.READ | module.WRITE)]
    poller.modify(one.fileno(), 0)
    assert waited(poller, 0.0) == []
    poller.modify(one.fileno(), module.READ)
    assert waited(poller) == [("one", module.READ)]


def test_removed_socket_is_not_reported(poller: Poller, pair: Pair) -> None:
    one, other = pair
    other.send(b"x")
    poller.add(one.fileno(), "one", module.READ)
    poller.remove(one.fileno())
    poller.modify(one.fileno(), module.READ)  # too late: does nothing
    poller.remove(one.fileno())
    assert waited(poller, 0.0) == []


def test_descriptor_that_is_used_again_has_its_new_token(poller: Poller) -> None:
    for number in range(50):
        one, other = socket.socketpair()
        with one, other:
            poller.add(one.fileno(), f"token{number}", module.READ)
            other.send(b"x")
            if number % 2:
                assert waited(poller) == [(f"token{number}", module.READ)]
            poller.remove(one.fileno())
        # Closed, and the next one gets the same number.
    assert waited(poller, 0.0) == []


def wait_in_thread(poller: Poller) -> tuple[threading.Thread, list[object]]:
    result: list[object] = []

    def wait() -> None:
        result.extend(waited(poller))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, result


def test_socket_that_is_added_while_a_thread_waits_is_waited_for(
    poller: Poller, pair: Pair
) -> None:
    thread, result = wait_in_thread(poller)
    pair[1].send(b"x")
    poller.add(pair[0].fileno(), "one", module.READ)
    thread.join(PATIENCE)
    assert result == [("one", module.READ)]


def test_change_while_a_thread_waits_takes_effect(poller: Poller, pair: Pair) -> None:
    pair[1].send(b"x")
    poller.add(pair[0].fileno(), "one", 0)
    assert waited(poller, 0.0) == []
    thread, result = wait_in_thread(poller)
    poller.modify(pair[0].fileno(), module.READ)
    thread.join(PATIENCE)
    assert result == [("one", module.READ)]


def test_wake_ends_a_wait(poller: Poller) -> None:
    poller.wake()
    assert poller.wait(PATIENCE) == [module.WOKEN]
    assert not poller.wait(0.0)  # it is used up
    waiting = threading.Thread(target=poller.wait, args=(PATIENCE,))
    waiting.start()
    poller.wake()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_hundred_thousand_wakes_neither_block_nor_stay(poller: Poller) -> None:
    for _ in range(100_000):
        poller.wake()
    assert poller.wait(PATIENCE) == [module.WOKEN]
    assert not poller.wait(0.0)


def test_closed_poller_takes_wakes_and_leaves_no_descriptor() -> None:
    with check_no_descriptors_left():
        for kind in (EpollPoller, SelectorPoller):
            made = kind()
            made.close()
            made.wake()


def test_selectors_stand_in_where_there_is_no_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(module.new_poller(), EpollPoller)
    monkeypatch.delattr(module.select, "epoll")
    made = module.new_poller()
    assert isinstance(made, SelectorPoller)
    made.close()
    assert (selectors.EVENT_READ, selectors.EVENT_WRITE) == (1, 2)
