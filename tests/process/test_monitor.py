"""`farcall status` and `farcall stacks` on groups of real processes, that hang in many ways."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from causes import CAUSES, causes, hanging, patiently
from patience import PATIENCE

from farcall.errors import LinkError
from farcall.monitor import AskResult, ask_all, doctor, explain
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


@pytest.mark.parametrize("name", CAUSES)
def test_stacks_name_the_cause_of_a_hang(tmp_path: Path, name: str) -> None:
    with hanging(name, tmp_path) as pid:
        assert causes(pid, *CAUSES[name])


FULL_TABLE = """
import os, resource
from farcall.runtime.inspection import looking
limit = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit - 1, limit))
print(looking._descriptors() == (limit - 1, limit - 1))
"""


@pytest.mark.cold  # a warm start has a descriptor far from the others
def test_full_table_of_descriptors_is_no_empty_one() -> None:
    command = [sys.executable, "-c", FULL_TABLE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


COLUMNS = ["worker", "role", "rank", "host", "pid", "state", "age", "out", "in", "queued", "served"]
COLUMNS += ["memory", "files", "refs", "paths"]


def test_status_shows_a_group(tmp_path: Path) -> None:
    with hanging("full_pool", tmp_path) as pid:
        causes(pid, "w1 has 16 calls queued")
        shown = of_group(pid, "status")
        assert [shown.count(f"w{rank} ") for rank in range(3)] == [1, 1, 1]
        assert shown.split("\n")[0].split() == COLUMNS
        row = next(line for line in shown.split("\n") if line.startswith("w1 "))
        assert row.split()[:3] == ["w1", "-", "1"]  # a role that is empty moves no column
        found = json.loads(of_group(pid, "status", "--json"))
        [w1] = [one for one in found["reports"] if one["name"] == "w1"]
        assert len(w1["served"]) == 20
        assert {one["name"]: one["path"][:3] for one in w1["members"]}["w0"] == "shm"
        assert w1["received"] >= 20
        text = of_group(pid, "stacks", "w1")
        assert "runs `__main__:forever` for w0" in text
        assert "threading.Event().wait()" in text


def test_status_counts_calls_that_were_served(tmp_path: Path) -> None:
    with hanging("stopped_peer", tmp_path) as pid:
        causes(pid, "w1 (pid", "is stopped")
        w2 = report_of("w2", pid)
        assert (w2.received, len(w2.served)) == (1, 0)
        for shown in patiently(lambda: farcall("status", "--group", str(pid)).splitlines()):
            assert " served " in shown[0]
            row = next((line for line in shown if line.startswith("w2 ")), "")
            if " MB " in row:  # it has answered
                break
        assert row.split()[-1] == "w0=shm"


def test_doctor_names_a_hang_first_and_measures_nothing_then(tmp_path: Path) -> None:
    with hanging("lock_held", tmp_path) as pid:
        causes(pid, *CAUSES["lock_held"])
        diagnosis = doctor(group=pid, timeout=PATIENCE)
        assert diagnosis.findings[0].level == "wrong"
        assert diagnosis.findings[0].subject == "hang"
        assert all(pair.path.latency is None for pair in diagnosis.pairs)
        assert diagnosis.unmeasured == "something hangs"


def test_doctor_measures_each_path_of_a_group(tmp_path: Path) -> None:
    with hanging("full_queue", tmp_path) as pid:
        causes(pid, *CAUSES["full_queue"])
        # Each call of a measurement has a second.
        for found in patiently(lambda: json.loads(measured(pid, "--json"))):
            pairs = {(one["caller"], one["path"]["name"]): one["path"] for one in found["pairs"]}
            if all(path["bandwidth"] for path in pairs.values()):
                break
        names = ("w0", "w1", "w2")
        assert pairs.keys() == {(one, other) for one in names for other in names if one != other}
        for path in pairs.values():
            assert path["latency"] > 0
            assert path["bandwidth"] > 0
            assert (path["path"][:3], path["protection"], path["drawback"]) == ("shm", "local", "")
        row = r"w0 +w1 +shm +\d+ us +[\d.]+ [GM]B/s +local"
        text = next(text for text in patiently(lambda: measured(pid)) if re.search(row, text))
        assert "wrong  hang: w0 waits for `__main__:put_twice` on w1" in text.splitlines()[0]


def test_metrics_of_a_group_are_printed_and_served(tmp_path: Path) -> None:
    queued = 'farcall_calls_being_served{state="is queued",worker="w1"} 16.0'
    with hanging("full_pool", tmp_path) as pid:
        causes(pid, "w1 has 16 calls queued")
        assert queued in of_group(pid, "metrics").splitlines()
        command = [sys.executable, "-m", "farcall", "metrics", "--port", "0", "--group", str(pid)]
        command += ["--timeout", str(PATIENCE)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                with urlopen(server.stdout.readline().strip(), timeout=PATIENCE) as answer:
                    assert queued in answer.read().decode().splitlines()
            finally:
                server.send_signal(signal.SIGINT)
        assert server.returncode == 130


def report_of(name: str, pid: int) -> WorkerReport:
    """Return the report as soon as this worker answers within its second."""
    for answer in patiently(lambda: ask_all().of_group(pid)):
        for one in answer.reports:
            if one.name == name:
                return one
    raise AssertionError(f"{name} does not answer")


def connected(pid: int, kind: str) -> socket.socket:
    """Return a connection to w1 of a group in which `lock_held` is a cause."""
    causes(pid, "need_lock")
    [w1] = [one for one in report_of("w0", pid).members if one.name == "w1"]
    url = next(url for url in w1.addresses if url.startswith(kind))
    place = tcp_of(url)
    if place is not None:
        return socket.create_connection(place)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + url.removeprefix("unix:@"))
    return sock


def ask(sock: socket.socket, terms: Terms) -> handshake.HandshakeResult:
    deadline = time.monotonic() + PATIENCE
    return handshake.connect(sock, ASKER, terms, expects=0, deadline=deadline)


def test_processes_of_the_same_user_ask_without_the_secret(tmp_path: Path) -> None:
    with hanging("lock_held", tmp_path, FARCALL_SECRET=secrets.token_hex(16)) as pid:
        causes(pid, "need_lock")
        assert report_of("w1", pid).served


def test_a_process_that_asks_over_tcp_needs_the_secret(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    with hanging("lock_held", tmp_path, FARCALL_SECRET=secret) as pid:
        for wrong in (None, secrets.token_bytes(32)):
            with connected(pid, "tcp:") as sock, pytest.raises(LinkError):
                ask(sock, LinkCredentials(wrong).over(sock))
        with connected(pid, "tcp:") as sock:
            met = ask(sock, LinkCredentials(Secret(secret).reveal()).over(sock))
            assert met.peer.name == "w1"
            assert met.keys is not None


def test_a_process_that_asks_can_not_call(tmp_path: Path) -> None:
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


def test_an_asker_leaves_the_secret_to_a_worker_that_starts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("FARCALL_SECRET", secret)
    credentials_of_this_process()
    assert os.environ["FARCALL_SECRET"] == secret


def test_stacks_refuse_a_worker_that_is_not_there() -> None:
    done = run("stacks", "a-name-of-no-worker")
    assert done.returncode == 1
    assert "there is no worker 'a-name-of-no-worker'" in done.stderr


def test_nothing_hangs_where_nothing_is() -> None:
    assert explain(AskResult([], [])) == []


def of_group(pid: int, *arguments: str) -> str:
    """Return a command's output of a group in which every worker answers, sooner or later."""
    return farcall(*arguments, "--group", str(pid), "--timeout", str(PATIENCE))


def measured(pid: int, *arguments: str) -> str:
    """Return the output of a doctor that has time to measure each path of a group."""
    return of_group(pid, "doctor", "--measure", "--seconds", str(PATIENCE), *arguments)


def farcall(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farcall", *arguments], capture_output=True, text=True, check=False
    )
