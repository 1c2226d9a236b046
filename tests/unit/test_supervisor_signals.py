"""A launcher hears a signal while its main thread runs no Python code."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from patience import PATIENCE

from farcall.processes.output import Output
from farcall.processes.supervisor import Rules, Supervisor
from farcall.processes.workers import Starter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="calls the C library")


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Have none of the signals ignored, as one is under nohup."""
    before = [signal.signal(number, signal.default_int_handler) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    output = Output(folder=tmp_path)
    starter = Starter(output)
    yield Supervisor([], [], starter, output, Rules(0, 0.0, 0.0), print)
    starter.close()
    output.close()


def wait_until_main_thread_receives() -> None:
    waits_in = Path(f"/proc/self/task/{threading.main_thread().native_id}/wchan")
    deadline = time.monotonic() + PATIENCE
    while "unix_stream" not in waits_in.read_text():
        assert time.monotonic() < deadline, waits_in.read_text()
        time.sleep(0.001)


@pytest.mark.skipif(
    not Path("/proc/self/wchan").exists(), reason="the kernel does not say where a thread waits"
)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_an_event_although_its_handler_can_not_run(
    supervisor: Supervisor, number: signal.Signals
) -> None:
    """Hold the main thread in a function of C: no handler of Python's runs until that returns."""
    ours, theirs = socket.socketpair()
    seen: list[object] = []

    def see() -> None:
        wait_until_main_thread_receives()
        signal.pthread_kill(threading.get_ident(), number)  # so that it interrupts no other thread
        try:
            seen.append(supervisor._events.get(timeout=PATIENCE))
        except Empty:
            seen.append("nothing")
        theirs.send(b"!")

    with ours, theirs, supervisor._signals():
        thread = threading.Thread(target=see)
        thread.start()
        while ctypes.CDLL(None).recv(ours.fileno(), ctypes.create_string_buffer(1), 1, 0) != 1:
            pass
        thread.join(PATIENCE)
    assert seen == [number]


def test_signals_are_as_before_afterwards(supervisor: Supervisor) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with supervisor._signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before[1]
            os.kill(os.getpid(), signal.SIGTERM)
            assert supervisor._events.get(timeout=PATIENCE) is signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before[2])
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert signal.set_wakeup_fd(-1) == -1
