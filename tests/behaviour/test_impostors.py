"""An impostor, which can't prove to be the worker that it names, changes nothing for others."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from behaviour.helpers import PATIENCE, echo, wait_until
from farcall import rpc
from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.membership import losses
from farcall.runtime.membership.losses import Reception
from farcall.testing.cluster import TRANSPORTS
from farcall.transport.connect import handshake
from farcall.transport.connect.addresses import is_unix
from farcall.transport.connect.credentials import LinkCredentials
from farcall.transport.connect.dialling import dial
from farcall.transport.connect.handshake_messages import (
    DiallerReady,
    Hello,
    Identity,
    Proof,
    Unfinished,
)

SECRET = b"what only the members know"
NETWORKED = [name for name in TRANSPORTS if name != "inproc"]
SCHEMES = ["unix", "tcp"] if sys.platform == "linux" else ["tcp"]


def connection_to(agent: Agent, scheme: str = "tcp") -> socket.socket:
    (address,) = (one for one in agent.me.addresses if one.startswith(f"{scheme}:"))
    dialled = dial(address, PATIENCE, PATIENCE)
    assert dialled is not None
    dialled[0].settimeout(PATIENCE)
    return dialled[0]


def soon() -> float:
    return time.monotonic() + PATIENCE


def say(sock: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(struct.pack("<I", len(data)) + data)


def hello_of(worker: Worker, *, secured: bool) -> Hello:
    return Hello(
        "farcall",
        handshake.VERSION,
        worker.name,
        worker.id,
        worker.incarnation,
        0,
        "",
        "here",
        "",
        bytes(32),
        secured,
    )


def say_nothing(sock: socket.socket, worker: Worker) -> None:
    pass


def say_half(sock: socket.socket, worker: Worker) -> None:
    data = msgspec.msgpack.encode(hello_of(worker, secured=True))
    sock.sendall(struct.pack("<I", len(data)) + data[:40])


def say_hello(sock: socket.socket, worker: Worker) -> None:
    say(sock, hello_of(worker, secured=True))


def say_hello_without_a_secret(sock: socket.socket, worker: Worker) -> None:
    say(sock, hello_of(worker, secured=False))
    say(sock, DiallerReady())


def guess_the_proof(sock: socket.socket, worker: Worker) -> None:
    say(sock, hello_of(worker, secured=True))
    say(sock, Proof(bytes(32)))
    say(sock, DiallerReady())


def leave_out_the_proof(sock: socket.socket, worker: Worker) -> None:
    say(sock, hello_of(worker, secured=True))
    say(sock, DiallerReady())


def reflect(sock: socket.socket, worker: Worker) -> None:
    """Send back what the other side says."""
    say(sock, hello_of(worker, secured=True))
    with contextlib.suppress(OSError):
        while data := sock.recv(4096):
            sock.sendall(data)


Impostor = Callable[[socket.socket, Worker], None]
IMPOSTORS: list[Impostor] = [
    say_nothing,
    say_half,
    say_hello,
    say_hello_without_a_secret,
    guess_the_proof,
    leave_out_the_proof,
    reflect,
]


@pytest.mark.parametrize("transport", NETWORKED)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_no_process_without_the_secret_declares_a_worker_dead(
    start: Callable[..., list[Agent]], impostor: Impostor, scheme: str
) -> None:
    """Connect with the worker's incarnation, which is in the store, and close.

    Over TCP it has no certificate, and over Unix sockets, where none is needed, no proof.
    """
    w0, w1 = start(2, secret=SECRET)
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    for _ in range(5):
        sock = connection_to(w0, scheme)
        with contextlib.suppress(OSError):
            impostor(sock, w1.me)
        sock.close()
    assert rpc.rpc_sync("w1", echo, args=(2,)) == 2
    wait_until(lambda: not w0.endpoint._connections._shaking)  # type: ignore[attr-defined]
    assert w0.directory.known("w1") is not None
    assert [link.peer.name for link in w0.endpoint.links()] == ["w1"]


def meet(sock: socket.socket, me: Identity, secret: bytes | None) -> None:
    """Shake hands with knowledge of the secret, if there is one."""
    terms = LinkCredentials(secret).over(sock)
    met = handshake.connect(sock, me, terms, expects=0, deadline=soon())
    assert (met.keys is not None) == (secret is not None and not is_unix(sock))


def shake_hands(agent: Agent, me: Identity, secret: bytes | None) -> None:
    """Dial a worker with knowledge of the secret; leave at once if it lets us in."""
    with connection_to(agent) as sock:
        meet(sock, me, secret)


@pytest.mark.parametrize("transport", NETWORKED)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_newcomer_takes_no_place_in_a_fixed_group(
    start: Callable[..., list[Agent]], secret: bytes | None
) -> None:
    w0, w1, w2 = start(3, secret=secret)
    impostors = [
        (Identity("w1", 1, new_incarnation()), "was not at the rendezvous"),
        (Identity("w7", 7, new_incarnation()), "was not at the rendezvous"),
        (Identity("w1", 1, w2.me.incarnation), "this incarnation is 'w2', not 'w1'"),
        (Identity("w0", 0, w0.me.incarnation), "says that it is this worker itself"),
    ]
    for impostor, reason in impostors:
        with pytest.raises(LinkError, match=reason):
            shake_hands(w0, impostor, secret)
    for worker in (w1, w2):
        assert w0.directory.known(worker.me.name) is w0.directory.of_incarnation(
            worker.me.incarnation
        )
        assert rpc.rpc_sync(worker.me.name, echo, args=(1,)) == 1
    assert len(w0.directory.all()) == 3


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_newcomer_takes_no_name_from_one_that_lives_where_workers_come_and_go(
    start: Callable[..., list[Agent]],
) -> None:
    stored: dict[object, Worker] = {}
    w0, w1 = start(2, secret=SECRET, find=lambda key, deadline: stored.get(key))
    stored.update({"w1": w1.me, 1: w1.me})
    with connection_to(w0) as sock:
        me = Identity("w1", 1, new_incarnation())
        meet(sock, me, SECRET)
        wait_until(lambda: len(w0.endpoint.links()) == 1)
    wait_until(lambda: not w0.endpoint.links())
    assert w0.directory.known("w1") is w0.directory.of_incarnation(w1.me.incarnation)
    assert rpc.rpc_sync("w1", echo, args=(1,)) == rpc.rpc_sync(1, echo, args=(1,)) == 1


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_newcomer_has_the_name_that_the_store_says_it_has(
    start: Callable[..., list[Agent]],
) -> None:
    """Let it come back, while the end of the one before has not been noticed here."""
    stored: dict[object, Worker] = {}
    w0, _ = start(2, secret=SECRET, find=lambda key, deadline: stored.get(key))
    again = Worker("w1", 1, new_incarnation(), ("tcp://127.0.0.1:1",), "here", 1)
    stored.update({"w1": again, 1: again})
    with connection_to(w0) as sock:
        me = Identity("w1", 1, again.incarnation)
        meet(sock, me, SECRET)
        known = w0.directory.known("w1")
        assert known is not None
        assert known.incarnation == again.incarnation


def test_a_dialler_waits_for_a_worker_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    reception = Reception()
    monkeypatch.setattr(losses, "START_SECONDS", 0.05)
    with pytest.raises(Unfinished, match="still starting"):
        reception.admit("w1", 1, 0)
    monkeypatch.setattr(losses, "START_SECONDS", PATIENCE)
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(reception.admit("w1", 1, 0)))
    thread.start()
    reception.open(None)
    thread.join()
    assert said == ["this worker has not started"]


@pytest.mark.parametrize("transport", NETWORKED)
def test_refusals_are_told_and_no_flood(
    start: Callable[..., list[Agent]], caplog: pytest.LogCaptureFixture
) -> None:
    w0, _ = start(2, secret=SECRET)
    with caplog.at_level(logging.WARNING, "farcall"):
        for _ in range(30):
            with pytest.raises(LinkError, match="was not at the rendezvous"):
                shake_hands(w0, Identity("w1", 1, new_incarnation()), SECRET)
    assert len(caplog.records) < 20
