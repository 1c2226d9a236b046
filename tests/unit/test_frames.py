"""A look at what all threads do does not stop the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
from patience import PATIENCE

from farcall.runtime.threads import thread_stacks as frames
from farcall.runtime.threads.thread_stacks import current_frames

# With `sys._current_frames` itself, Python 3.11.7 stops in the first hundred or so.
PROGRAM = """
import gc, threading, time
from farcall.runtime.threads.thread_stacks import current_frames

def begin_and_end_threads():
    while not over.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

over = threading.Event()
threads = [threading.Thread(target=begin_and_end_threads) for _ in range(4)]
for thread in threads:
    thread.start()
gc.callbacks.append(lambda *_: time.sleep(0))  # whoever collects lets another thread run
gc.set_threshold(1)
for _ in range(2000):
    assert threading.get_ident() in current_frames()
over.set()
for thread in threads:
    thread.join()
"""


def test_threads_begin_and_end_while_all_are_looked_at():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE)


def test_frames_are_those_of_all_threads():
    arrived, over = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        over.wait(PATIENCE)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert arrived.wait(PATIENCE)
        codes = {ident: frame.f_code for ident, frame in current_frames().items()}
    finally:
        over.set()
        thread.join()
    assert codes.keys() >= {thread.ident, threading.get_ident()}
    assert codes[threading.get_ident()] is current_frames.__code__


@pytest.mark.parametrize("fails", [False, True])
def test_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        if fails:
            monkeypatch.setattr(frames.sys, "_current_frames", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                current_frames()
        else:
            current_frames()
        assert gc.get_threshold() == (701, 11, 12)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_what_a_function_held_ends_with_it():
    class Value:
        pass

    def look() -> weakref.ref[Value]:
        value = Value()
        assert threading.get_ident() in current_frames()
        return weakref.ref(value)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()
