"""`farcall status` and `farcall stacks` on groups of real processes, that hang in many ways."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from patience import PATIENCE

from farcall.errors import LinkError
from farcall.monitor import Answer, ask_all, explain
from farcall.monitor.asking import credentials_of_this_process
from farcall.runtime.inspection.reports import WorkerReport
from farcall.runtime.options.secret import Secret
from farcall.transport.connect import handshake
from farcall.transport.connect.addresses import tcp_of
from farcall.transport.connect.credentials import LinkCredentials, Terms
from farcall.transport.connect.handshake_messages import Identity
from farcall.wire.frames import Frame, encode
from farcall.wire.messages import Request

ASKER = Identity("", -1, 0, asks=True)
PROGRAM = Path(__file__).with_name("programs") / "hangs.py"
LINES = 5  # of the output in which the cause has to be


@contextmanager
def hanging(name: str, folder: Path, **variables: str) -> Iterator[int]:
    """A group that hangs. Gives the process id of its first worker."""
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
        (
            "stopped_peer",
            ["w1 (pid", "does not answer", "is stopped (SIGSTOP", "calls that wait for it: 1"],
        ),
        (
            "gil_held",
            ["w1 (pid", "does not answer", "Python's lock (GIL)", "calls that wait for it: 2"],
        ),
        ("full_pool", ["w1 has 16 calls queued", "4 of 4 functions run", "num_worker_threads"]),
        ("full_queue", ["put_twice` on w1", "is at", "QUEUE.put(2)"]),
        ("lost_future", ["wait_for_nobody` on w1", "where it waits for its future"]),
        (
            "endless_function",
            ["ask` on w1", "waits for `__main__:forever` on w2", "Event().wait()"],
        ),
        ("forgotten_shutdown", ["w0 waits in shutdown for", "w1", "w2", "must call shutdown"]),
        ("missing_rank", ["w0 (rank 0) waits in init_rpc", "others of a group of 3"]),
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


def test_metrics_of_a_group_are_printed_and_served(tmp_path: Path) -> None:
    queued = 'farcall_calls_being_served{state="is queued",worker="w1"} 16.0'
    with hanging("full_pool", tmp_path) as pid:
        causes(pid, "w1 has 16 calls queued")
        assert queued in farcall("metrics", "--group", str(pid)).splitlines()
        command = [sys.executable, "-m", "farcall", "metrics", "--port", "0", "--group", str(pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                with urlopen(server.stdout.readline().strip(), timeout=PATIENCE) as answer:
                    assert queued in answer.read().decode().splitlines()
            finally:
                server.send_signal(signal.SIGINT)
        assert server.returncode == 130


def report_of(name: str, pid: int) -> WorkerReport:
    causes(pid, "need_lock")
    answer = ask_all().of_group(pid)
    return next(one for one in answer.reports if one.name == name)


def connected(pid: int, kind: str) -> socket.socket:
    """A connection to w1 of a group in which `lock_held` is."""
    [w1] = [one for one in report_of("w0", pid).members if one.name == "w1"]
    url = next(url for url in w1.addresses if url.startswith(kind))
    place = tcp_of(url)
    if place is not None:
        return socket.create_connection(place)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + url.removeprefix("unix:@"))
    return sock


def ask(sock: socket.socket, terms: Terms) -> handshake.Met:
    deadline = time.monotonic() + PATIENCE
    return handshake.connect(sock, ASKER, terms, expects=0, deadline=deadline)


def test_processes_of_the_same_user_ask_without_the_secret(tmp_path: Path) -> None:
    with hanging("lock_held", tmp_path, FARCALL_SECRET=secrets.token_hex(16)) as pid:
        assert report_of("w1", pid).served


def test_whoever_asks_over_tcp_needs_the_secret(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    with hanging("lock_held", tmp_path, FARCALL_SECRET=secret) as pid:
        for wrong in (None, secrets.token_bytes(32)):
            with connected(pid, "tcp:") as sock, pytest.raises(LinkError):
                ask(sock, LinkCredentials(wrong).over(sock))
        with connected(pid, "tcp:") as sock:
            met = ask(sock, LinkCredentials(Secret(secret).reveal()).over(sock))
            assert met.peer.name == "w1"
            assert met.keys is not None


def test_whoever_asks_can_not_call(tmp_path: Path) -> None:
    with hanging("lock_held", tmp_path) as pid, connected(pid, "unix:") as sock:
        met = ask(sock, Terms(is_local=True))
        request = Frame(Request("__main__:hold_the_gil", 0.0), 1, b"", ())
        with suppress(ConnectionError):  # it hangs up
            sock.sendall(b"".join(encode(request)))
        sock.settimeout(PATIENCE)
        with suppress(ConnectionError):
            assert sock.recv(1) == b""
        assert met.peer.name == "w1"
        assert report_of("w1", pid).served  # and does not hold the GIL


def test_who_asks_leaves_the_secret_to_a_worker_that_starts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("FARCALL_SECRET", secret)
    credentials_of_this_process()
    assert os.environ["FARCALL_SECRET"] == secret


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
