"""An unreachable rendezvous says what is wrong with it, in time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from patience import PATIENCE
from torch.distributed import TCPStore

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.runtime import store_probe
from farcall.runtime.stores import open_store

BRIEFLY = 0.5


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [one for one in threading.enumerate() if one.name.startswith("farcall ")]
    assert [one for one in left if one not in before] == []


def refused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Something else that listens: `answer` gets each connection."""
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

    def late(name: str, *args: object, **options: object) -> object:
        if name == "later" and failures:
            raise failures.pop()
        return look_up("127.0.0.1" if name == "later" else name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    find(f"tcp://later:{server.port}", PATIENCE)


def test_a_closed_port() -> None:
    port = refused_port()
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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda sock: None, "no answer|said nothing"),
        (lambda sock: sock.close(), "closed the connection"),
        (lambda sock: (sock.recv(4096), sock.close()), "closed the connection"),
    ],
    ids=["silent", "closes", "reads and closes"],
)
def test_something_else_that_says_nothing(
    answer: Callable[[socket.socket], object], reason: str
) -> None:
    with listener(answer) as port, pytest.raises(RendezvousTimeout, match=reason):
        find(f"tcp://127.0.0.1:{port}")


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
    port = refused_port()
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
    # What listens on all interfaces takes connections to this address, too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), PATIENCE)


def test_with_a_secret_the_store_listens_for_others() -> None:
    store, *_ = open_store("tcp://127.0.0.1:0", 0, 1, PATIENCE)
    socket.create_connection(("127.0.0.2", store.port), PATIENCE).close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_another_machine_is_no_meeting_place(rank: int) -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1:9.*another machine.*FARCALL_SECRET"):
        open_store("tcp://192.0.2.1:9", rank, 2, 0, confined=True)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_without_a_secret_an_address_of_this_machine_means_loopback(
    monkeypatch: pytest.MonkeyPatch, use_libuv: bool
) -> None:
    look_up = socket.getaddrinfo

    def of_this_machine(name: str, *args: object, **options: object) -> object:
        if name == "me":
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
    """As that of `init_process_group`, at the same MASTER_PORT."""
    first = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    second, *_ = open_store(f"tcp://127.0.0.1:{first.port}", 0, 2, PATIENCE, confined=True)
    second.set("key", "value")
    assert first.get("key") == b"value"
