"""`farcall status` and `farcall stacks` on groups of real processes, that hang in many ways."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farcall.monitor import Answer, ask_all, explain

PROGRAM = Path(__file__).with_name("programs") / "hangs.py"
LINES = 5  # of the output in which the cause has to be


@contextmanager
def hanging(name: str, folder: Path) -> Iterator[int]:
    """A group that hangs. Gives the process id of its first worker."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), name, str(folder / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


def causes(pid: int, *words: str) -> list[str]:
    """What is said of a group, as soon as all of the words are in one of the first lines."""
    while True:
        lines = explain(ask_all(stacks=True).of_group(pid))[:LINES]
        if any(all(word in line for word in words) for line in lines):
            return lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lock_held", ["w0 waits for `__main__:need_lock` on w1", "with LOCK"]),
        ("deadlock_of_two", ["a circle of waits, w0 -> w0 -> w1 -> w0", "with LOCK"]),
        ("circle_of_three", ["a circle of waits, w0 -> w0 -> w1 -> w2 -> w0", "with LOCK"]),
        ("stopped_peer", ["w1 (pid", "does not answer", "is stopped (SIGSTOP", "calls wait"]),
        ("gil_held", ["w1 (pid", "does not answer", "Python's lock (GIL)", "calls wait"]),
        ("full_pool", ["w1 has 16 calls queued", "4 of 4 functions run", "num_worker_threads"]),
        ("full_queue", ["put_twice` on w1", "QUEUE.put(2)"]),
        ("lost_future", ["wait_for_nobody` on w1", "where it waits for its future"]),
        ("endless_function", ["ask` on w1", "waits for `__main__:forever` on w2", "wait()"]),
        ("forgotten_shutdown", ["w0 waits in shutdown for", "w1", "w2", "must call shutdown"]),
        ("missing_rank", ["w0 (rank 0) waits in init_rpc", "group of 3", "also there: w1"]),
    ],
)
def test_stacks_name_the_cause_of_a_hang(tmp_path: Path, name: str, words: list[str]) -> None:
    with hanging(name, tmp_path) as pid:
        causes(pid, *words)


def test_status_shows_a_group(tmp_path: Path) -> None:
    with hanging("full_pool", tmp_path) as pid:
        causes(pid, "w1 has 16 calls queued")
        shown = farcall("status", "--group", str(pid))
        assert [shown.count(f"w{rank} ") for rank in range(3)] == [1, 1, 1]
        found = json.loads(farcall("status", "--group", str(pid), "--json"))
        [w1] = [one for one in found["reports"] if one["name"] == "w1"]
        assert len(w1["served"]) == 20
        assert {one["name"]: one["path"][:3] for one in w1["members"]}["w0"] == "shm"
        text = farcall("stacks", "--group", str(pid), "w1")
        assert "runs `__main__:forever` for w0" in text
        assert "threading.Event().wait()" in text


def test_stacks_refuse_a_worker_that_is_not_there() -> None:
    done = run("stacks", "nobody-has-this-name")
    assert done.returncode == 1
    assert "there is no worker 'nobody-has-this-name'" in done.stderr


def test_nothing_hangs_where_nothing_is() -> None:
    assert explain(Answer([], [])) == []


def farcall(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farcall", *arguments], capture_output=True, text=True, check=False
    )
