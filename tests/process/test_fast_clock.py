"""`tests/fast_clock.c`, by which `make test-slow` runs tests as on a slower machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

SOURCE = Path(__file__).parents[1] / "fast_clock.c"
COMPILER = shutil.which(os.environ.get("CC", "cc"))
FACTOR = 2000
# Each wait is twice as long as the patience of this test, and ends in less than a second.
SECONDS = 2 * PATIENCE
WAITS = f"""
import asyncio, queue, select, signal, socket, subprocess, sys, threading, time

a, b = socket.socketpair()
a.settimeout({SECONDS})
poll, epoll = select.poll(), select.epoll()
for one in poll, epoll:
    one.register(a, select.POLLIN)
thread = threading.Thread(target=time.sleep, args=({SECONDS},))


def receive():
    try:
        a.recv(1)
    except TimeoutError:
        pass


def run():
    try:
        subprocess.run([sys.executable, "-c", "input()"], stdin=b, timeout={SECONDS})
    except subprocess.TimeoutExpired:
        pass


def take():
    try:
        queue.SimpleQueue().get(timeout={SECONDS})
    except queue.Empty:
        pass


def alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, {SECONDS})
    signal.pause()


def join():
    thread.start()
    thread.join()


WAITS = {{
    "asyncio.sleep": lambda: asyncio.run(asyncio.sleep({SECONDS})),
    "Condition.wait": lambda: threading.Event().wait({SECONDS}),
    "epoll": lambda: epoll.poll({SECONDS}),
    "join": join,
    "poll": lambda: poll.poll({SECONDS} * 1000),
    "queue": take,
    "recv": receive,
    "run": run,
    "select": lambda: select.select([a], [], [], {SECONDS}),
    "setitimer": alarm,
    "sleep": lambda: time.sleep({SECONDS}),
}}
for name, wait in WAITS.items():
    before = time.monotonic()
    wait()
    assert time.monotonic() - before >= {SECONDS}, name
print("all have ended")
"""


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="no compiler for Linux")
def test_waits_are_shorter_than_the_clock_says(tmp_path: Path) -> None:
    assert COMPILER is not None
    library = tmp_path / "fast_clock.so"
    command = [COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", library, SOURCE, "-ldl"], check=True, timeout=PATIENCE)
    variables = {"LD_PRELOAD": str(library), "FAST_CLOCK": str(FACTOR)}
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        env=os.environ | variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "all have ended\n"
