"""An unreachable rendezvous says in time why it can't be reached, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port
from threads_left import check_no_threads_left
from torch.distributed import TCPStore

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.runtime.membership import store_probe
from farcall.runtime.membership.stores import open_store

BRIEFLY = 0.5
TRIES = 20  # of a test whose times a busy machine may upset


def again_if_busy(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test again with the same times: a fault shows each time, a pause now and then."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        for _ in range(TRIES - 1):
            with contextlib.suppress(AssertionError, pytest.fail.Exception):
                return test(**given)
        return test(**given)

    return run


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with check_no_threads_left("farcall "):
        yield


@pytest.fixture
def refused_port() -> Iterator[int]:
    """Give a port that refuses connections, and that no other program can take."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield int(silent.getsockname()[1])


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Listen as another program would: `answer` gets each connection."""
    server = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                kept.append(sock)
                with contextlib.suppress(OSError):
                    answer(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(PATIENCE)
        for sock in kept:
            sock.close()


def find(url: str, timeout: float = BRIEFLY, *, confined: bool = False) -> None:
    open_store(url, 1, 2, timeout, confined=confined)


@pytest.mark.parametrize("confined", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch, confined: bool, rank: int
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RendezvousTimeout) as raised:
        open_store("tcp://nowhere:1", rank, 2, BRIEFLY, confined=confined)
    reason = "the name 'nowhere' can't be resolved ([Errno -2] Name or service not known)"
    assert f"nowhere:1 in 0.5 s: {reason}" in str(raised.value)


def test_a_name_that_resolves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, failures = socket.getaddrinfo, [socket.gaierror(-2, "not yet")] * 3

    def late(name: bytes, *args: object, **options: object) -> object:
        if name == b"later" and failures:
            raise failures.pop()
        return look_up("127.0.0.1" if name == b"later" else name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    find(f"tcp://later:{server.port}", PATIENCE)
    assert not failures


@again_if_busy
def test_a_closed_port(refused_port: int) -> None:
    port = refused_port
    with pytest.raises(RendezvousTimeout) as raised:
        find(f"tcp://127.0.0.1:{port}")
    assert (
        f"no store answered at 127.0.0.1:{port} in 0.5 s: can't connect to 127.0.0.1 "
        "([Errno 111] Connection refused); is rank 0 running"
    ) in str(raised.value)


def say(data: bytes) -> Callable[[socket.socket], object]:
    return lambda sock: sock.sendall(data)


def echo(sock: socket.socket) -> None:
    sock.sendall(sock.recv(4096))


@pytest.mark.parametrize(
    "answer",
    [say(b"HTTP/1.1 400 Bad Request\r\n\r\n"), say(b"SSH-2.0-x\r\n"), say(bytes(16)), echo],
    ids=["http", "ssh", "zeros", "echo"],
)
def test_something_else_that_says_so_ends_the_search_at_once(
    answer: Callable[[socket.socket], object],
) -> None:
    # Not at the timeout, of which there is none.
    with (
        listener(answer) as port,
        pytest.raises(RendezvousError, match=r"something else listens at 127\.0\.0\.1: it said b'"),
    ):
        find(f"tcp://127.0.0.1:{port}", 0)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


CLOSED = r"and closed it( \(\[Errno (104|32)\] (Connection reset by peer|Broken pipe)\))?"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda sock: None, "and said nothing"),
        (lambda sock: sock.close(), CLOSED),
        (lambda sock: (sock.recv(4096), sock.close()), CLOSED),
        (reset, CLOSED),
    ],
    ids=["silent", "closes", "reads and closes", "resets"],
)
@pytest.mark.parametrize("timeout", [0.1, BRIEFLY, 1.3])
@again_if_busy
def test_something_else_that_says_nothing(
    answer: Callable[[socket.socket], object], reason: str, timeout: float
) -> None:
    with listener(answer) as port, pytest.raises(RendezvousTimeout) as raised:
        find(f"tcp://127.0.0.1:{port}", timeout)
    where = rf"127\.0\.0\.1:{port} in {timeout} s"
    listens = r"something else listens at 127\.0\.0\.1: it took the connection"
    says = f"no store answered at {where}: {listens} {reason}; is rank 0 running.*"
    assert re.fullmatch(says, str(raised.value))


def test_a_full_backlog_is_no_answer_to_the_connection() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with pytest.raises(
            RendezvousTimeout, match=r"can't connect to 127\.0\.0\.1 \(no answer\);"
        ):
            find(f"tcp://127.0.0.1:{server.getsockname()[1]}")


# --- the reason that is known stays, when the last try ends for lack of time


def late(failure: Exception, after: float) -> Callable[..., object]:
    """Return a resolver or host that fails after so many seconds, or at its caller's timeout."""

    def fail(*args: object, timeout: float = PATIENCE, **options: object) -> object:
        time.sleep(min(after, timeout))
        if timeout < after:
            raise TimeoutError("timed out")
        raise failure

    return fail


TIMEOUTS = [0.3, 0.77, 1.31]


@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize("after", [0.01, 0.1])
@again_if_busy
def test_why_a_name_does_not_resolve_is_known_at_every_timeout(
    monkeypatch: pytest.MonkeyPatch, after: float, timeout: float
) -> None:
    failure = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", late(failure, after))
    with pytest.raises(RendezvousTimeout) as raised:
        find("tcp://nowhere:1", timeout)
    reason = "the name 'nowhere' can't be resolved ([Errno -2] Name or service not known); is"
    assert reason in str(raised.value)
    for thread in threading.enumerate():
        if thread.name == "farcall resolver":
            thread.join(PATIENCE)


@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize("after", [0.02, 0.1])
@pytest.mark.parametrize(
    "failure",
    [ConnectionRefusedError(111, "Connection refused"), OSError(113, "No route to host")],
    ids=["refused", "no route"],
)
@again_if_busy
def test_why_a_host_can_not_be_connected_is_known_at_every_timeout(
    monkeypatch: pytest.MonkeyPatch, failure: OSError, after: float, timeout: float
) -> None:
    monkeypatch.setattr(socket, "create_connection", late(failure, after))
    with pytest.raises(RendezvousTimeout) as raised:
        find("tcp://127.0.0.1:1", timeout)
    assert f"can't connect to 127.0.0.1 ({failure}); is" in str(raised.value)


@again_if_busy
def test_a_reason_that_took_long_stays_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ConnectionRefusedError(111, "Connection refused")
    monkeypatch.setattr(socket, "create_connection", late(failure, 0.4))
    with pytest.raises(RendezvousTimeout, match="Connection refused"):
        find("tcp://127.0.0.1:1", 0.8)


@again_if_busy
def test_a_host_that_falls_silent_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    def refuse_once(*args: object, timeout: float = 0.0) -> object:
        tries.append(timeout)
        if len(tries) == 1:
            raise ConnectionRefusedError(111, "Connection refused")
        time.sleep(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", refuse_once)
    with pytest.raises(RendezvousTimeout, match=r"can't connect to 127\.0\.0\.1 \(no answer\)"):
        find("tcp://127.0.0.1:1", 1.0)


def test_a_resolver_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [][over.wait(PATIENCE) :])
    try:
        with pytest.raises(
            RendezvousTimeout, match=r"resolved \(the resolver does not answer\); is"
        ):
            find("tcp://nowhere:1")
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "farcall resolver":
                thread.join(PATIENCE)


@again_if_busy
def test_the_systems_error_at_its_own_timeout_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        socket, "create_connection", late(TimeoutError(110, "Connection timed out"), 0.01)
    )
    with pytest.raises(RendezvousTimeout, match="Errno 110] Connection timed out"):
        find("tcp://127.0.0.1:1")


# --- files


def test_a_path_that_can_not_be_a_store_says_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.touch()
    os.mkfifo(fifo)
    for path, problem in {
        tmp_path: f"{tmp_path} is a directory: name a file, for instance {tmp_path}/workers",
        tmp_path / "no" / "store": f"the directory {tmp_path}/no does not exist",
        file / "store": f"{file} is not a directory",
        fifo: f"{fifo} is not a regular file",
    }.items():
        with pytest.raises(RendezvousError) as raised:
            find(f"file://{path}", PATIENCE)
        assert str(raised.value).endswith(problem)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do everything
    for path, problem in {
        file: f"no permission to read and write {file}",
        tmp_path / "new": f"no permission to write to the directory {tmp_path}",
    }.items():
        with pytest.raises(RendezvousError) as raised:
            find(f"file://{path}", PATIENCE)
        assert str(raised.value).endswith(problem)


@pytest.mark.parametrize("use_libuv", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_store_of_either_kind_is_known(host: str, use_libuv: bool) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    limit = timedelta(seconds=PATIENCE)
    server = TCPStore("localhost", 0, None, True, limit, False, use_libuv=use_libuv)
    url = f"tcp://{host}:{server.port}?use_libuv={int(use_libuv)}"
    store, *_ = open_store(url, 1, 2, PATIENCE)
    store.set("key", "value")
    assert server.get("key") == b"value"


def test_the_question_leaves_nothing_in_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = server.num_keys()
    store_probe._ask("127.0.0.1", server.port, PATIENCE)
    assert server.num_keys() == before


def test_a_store_that_comes_later_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked, found, ask = threading.Event(), threading.Event(), store_probe._ask

    def notice(address: str, port: int, seconds: float) -> None:
        try:
            ask(address, port, seconds)
        finally:
            asked.set()

    def search() -> None:
        find(f"tcp://127.0.0.1:{port}", PATIENCE)
        found.set()

    monkeypatch.setattr(store_probe, "_ask", notice)
    port = free_port()
    threading.Thread(target=search, daemon=True).start()
    assert asked.wait(PATIENCE)
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    assert found.wait(PATIENCE)
    assert server.port == port
    assert "c10d" not in capfd.readouterr().err


# --- a worker without a secret


def test_without_a_secret_the_store_listens_on_loopback_only() -> None:
    store, *_ = open_store("tcp://127.0.0.1:0", 0, 1, PATIENCE, confined=True)
    port = store.port  # type: ignore[attr-defined]
    find(f"tcp://127.0.0.1:{port}", PATIENCE, confined=True)
    # A server that listens on all interfaces takes connections to this address, too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), PATIENCE)


def test_with_a_secret_the_store_listens_for_others() -> None:
    store, *_ = open_store("tcp://127.0.0.1:0", 0, 1, PATIENCE)
    address = "127.0.0.2", store.port  # type: ignore[attr-defined]
    with socket.create_connection(address, PATIENCE) as sock:
        assert sock.getpeername() == address


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_another_machine_is_no_meeting_place(rank: int) -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1:9.*another machine.*FARCALL_SECRET"):
        open_store("tcp://192.0.2.1:9", rank, 2, 0, confined=True)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_without_a_secret_an_address_of_this_machine_means_loopback(
    monkeypatch: pytest.MonkeyPatch, use_libuv: bool
) -> None:
    look_up = socket.getaddrinfo

    def of_this_machine(name: bytes | str, *args: object, **options: object) -> object:
        if name in ("me", b"me"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.9.8.7", args[0]))]
        return look_up(name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", of_this_machine)
    monkeypatch.setattr(store_probe, "_is_own", lambda address: address == "10.9.8.7")
    query = f"?use_libuv={int(use_libuv)}"
    store, *_ = open_store(f"tcp://me:0{query}", 0, 2, PATIENCE, confined=True)
    port = store.port  # type: ignore[attr-defined]
    other, *_ = open_store(f"tcp://me:{port}{query}", 1, 2, PATIENCE, confined=True)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_this_process_hosts_already_is_shared() -> None:
    """Share it, as `init_process_group` has one at the same MASTER_PORT."""
    first = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    second, *_ = open_store(f"tcp://127.0.0.1:{first.port}", 0, 2, PATIENCE, confined=True)
    second.set("key", "value")
    assert first.get("key") == b"value"
