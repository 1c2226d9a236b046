"""A look at what all threads do does not stop the process."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from patience import PATIENCE

from farcall.runtime.threads import thread_stacks
from farcall.runtime.threads.thread_stacks import current_frames

SOURCES = Path(thread_stacks.__file__).parents[2]

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
gc.callbacks.append(lambda *_: time.sleep(0))  # the collecting thread lets another run
gc.set_threshold(1)
for _ in range(2000):
    assert threading.get_ident() in current_frames()
over.set()
for thread in threads:
    thread.join()
"""

# The function of a frame returns, and its thread ends, in one of the collections that a look at the
# frame makes. With `frame.f_back` itself, Python 3.11.7 ends by SIGSEGV.
LOOKS = """
import gc, threading
from farcall.runtime.threads.thread_stacks import caller_of, current_frames, variables_of

def outer():
    inner()

def inner():
    values = [object() for _ in range(100)]
    arrived.set()
    over.wait()

def end(phase, _):
    global collections
    collections += phase == "start"
    if collections == number and not over.is_set():
        over.set()
        thread.join()

usual = gc.get_threshold()
gc.callbacks.append(end)
for number in range(1, 20):
    arrived, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=outer)
    thread.start()
    arrived.wait()
    frame = current_frames()[thread.ident]
    while frame.f_code is not inner.__code__:
        frame = caller_of(frame)
    collections = 0
    gc.set_threshold(1)
    LOOK
    gc.set_threshold(*usual)
    over.set()
    thread.join()
"""


@pytest.mark.parametrize("look", ["caller_of(frame)", "variables_of(frame)"])
def test_function_returns_while_its_frame_is_looked_at(look: str) -> None:
    program = LOOKS.replace("LOOK", look)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects between instructions only")
def test_no_collection_starts_in_a_look() -> None:
    assert thread_stacks._uncollected(gc.get_threshold)[0] == 0


def test_no_other_module_looks_at_frames_of_other_threads() -> None:
    """Find each module that gets them, and each raw use of a frame in it."""
    raw = {"f_back", "f_locals", "_current_frames"}
    found = []
    for path in SOURCES.rglob("*.py"):
        text = path.read_text("utf-8")
        looks = "current_frames" in text and path.name != "thread_stacks.py"
        found += [
            f"{path}:{node.lineno}: take a function of thread_stacks.py"
            for node in (ast.walk(ast.parse(text)) if looks else ())
            if isinstance(node, ast.Attribute) and node.attr in raw
        ]
    assert found == []


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
    assert codes[threading.get_ident()] is thread_stacks._uncollected.__code__


@pytest.mark.parametrize("fails", [False, True])
def test_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        if fails:
            monkeypatch.setattr(thread_stacks.sys, "_current_frames", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                current_frames()
        else:
            current_frames()
        assert gc.get_threshold() == (701, 11, 12)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_an_object_that_a_function_held_ends_with_it():
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
