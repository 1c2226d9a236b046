"""Groups that hang (programs/hangs.py), and the words by which the cause of each is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from patience import PATIENCE

from farcall.monitor import ask_all, explain

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("programs") / "hangs.py"
LINES = 5  # of the output in which the cause has to be
# By the name of the hang: what has to be in one line.
CAUSES: dict[str, list[str]] = {
    "lock_held": ["w0 waits for `__main__:need_lock` on w1", "with LOCK"],
    "deadlock_of_two": ["a circle of waits, w0 -> w0 -> w1 -> w0", "with LOCK"],
    "deadlock_of_repeated_calls": ["a circle of waits, w0 -> w0 -> w1 -> w0", "with LOCK"],
    "circle_of_three": ["a circle of waits, w0 -> w0 -> w1 -> w2 -> w0", "with LOCK"],
    "stopped_peer": [
        "w1 (pid",
        "does not answer",
        "is stopped (SIGSTOP",
        "calls that wait for it: 1",
    ],
    "gil_held": ["w1 (pid", "does not answer", "Python's lock (GIL)", "calls that wait for it: 2"],
    "full_pool": ["w1 has 16 calls queued", "4 of 4 functions run", "num_worker_threads"],
    "full_queue": ["put_twice` on w1", "is at", "QUEUE.put(2)"],
    "lost_future": ["wait_for_nobody` on w1", "where it waits for its future"],
    "blocked_loop": [
        "the event loop of thread loop of w1 is blocked since",
        "2 coroutines wait",
        "in block_loop: ",
        "Event().wait()",
    ],
    "endless_function": ["ask` on w1", "waits for `__main__:forever` on w2", "Event().wait()"],
    "missed_barrier": [
        "w0, w1 in barrier since",
        "which w2 must call as well",
        "w2 is at",
        "Event().wait()",
    ],
    "missing_worker": ["w0 waits since", "for 'w9' to join (wait_for)"],
    "stopped_store": ["w0 waits since", "'w9' is", "the store does not answer"],
    # It has one descriptor left or none: it answers, or it does not.
    "no_files": ["w1 ", "files open, and may have", "ulimit -n"],
    "forgotten_shutdown": ["w0 waits in shutdown for", "w1", "w2", "must call shutdown"],
    "missing_rank": ["w0 (rank 0) waits in init_rpc", "others of a group of 3"],
}


@contextmanager
def hanging(name: str, folder: Path, **variables: str) -> Iterator[int]:
    """Start a group that hangs. Yield the process id of its first worker."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), name, str(folder / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    ) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


def causes(pid: int, *words: str) -> list[str]:
    """Return the lines about a group, as soon as all of the words are in one of the first lines."""
    for lines in patiently(lambda: explain(ask_all(stacks=True).of_group(pid))[:LINES]):
        if is_named(lines, words):
            return lines
    raise AssertionError(f"{words} not in {lines}")


def patiently(look: Callable[[], T]) -> Iterator[T]:
    """Look again and again, at least once, as long as a test has patience."""
    end = time.monotonic() + PATIENCE
    yield look()
    while time.monotonic() < end:
        yield look()


def is_named(lines: list[str], words: list[str] | tuple[str, ...]) -> bool:
    return any(all(word in line for word in words) for line in lines)
