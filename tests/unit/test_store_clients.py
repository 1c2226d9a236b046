"""Clients of torch's stores are made in bounded time: every place in the source that makes one."""

from __future__ import annotations

import ast
import inspect
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

import farcall
from farcall.compat.rpc import starting
from farcall.errors import RendezvousTimeout
from farcall.runtime.membership import stores

SOURCE = Path(inspect.getfile(farcall)).parent
MAKERS = {"TCPStore", "rendezvous", "create_store_from_options"}  # of torch
# A program of its own, which is its own server's client alone, and ends with its starter.
HOST = "processes/store.py"


def makers(tree: ast.AST) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that make a client, each with whether it is in a function for `bounded`."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    handed_on = {
        argument.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _name(call.func) == "bounded"
        for argument in call.args[:1]
        if isinstance(argument, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _name(node.func) not in MAKERS:
            continue
        above: ast.AST = node
        while above in parents and not isinstance(above, ast.FunctionDef):
            above = parents[above]
        yield node, isinstance(above, ast.FunctionDef) and above.name in handed_on


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_no_place_makes_a_client_of_a_store_without_a_bound() -> None:
    found = 0
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE).as_posix()
        for call, is_bounded in makers(ast.parse(path.read_text("utf-8"))):
            found += 1
            keywords = {keyword.arg for keyword in call.keywords}
            is_host = where == HOST and {"is_master", "master_listen_fd"} <= keywords
            assert is_bounded or is_host, f"{where}:{call.lineno} makes a client without a bound"
    assert found >= 4  # or the names have changed


@pytest.fixture
def halves() -> Iterator[int]:
    """Return the port of something that answers farcall's probe, and nothing that torch asks."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(sock,), daemon=True).start()

        def answer(sock: socket.socket) -> None:
            with sock:
                if b"farcall/probe" in sock.recv(4096):
                    sock.sendall(b"\x01")
                over.wait(PATIENCE)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        over.set()
        server.shutdown(socket.SHUT_RDWR)


def test_client_of_a_store_that_answers_by_halves_is_given_up(halves: int) -> None:
    with pytest.raises(RendezvousTimeout, match=r"answered one question, and not the next; hint"):
        stores.connect_to_store("127.0.0.1", halves, 0.5, hint="; hint")


@pytest.mark.parametrize("size", [None, 2])
def test_store_of_a_users_backend_is_given_up(
    monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    over = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        over.wait(PATIENCE)
        raise RuntimeError

    monkeypatch.setattr(starting.dist, "rendezvous", hang)
    monkeypatch.setattr(starting, "create_store_from_options", hang)

    class Given:
        init_method = "tcp://127.0.0.1:1"
        rpc_timeout = 0.1

    given: Any = Given()
    with pytest.raises(RendezvousTimeout, match=r"no store answered at tcp://.* in 0\.1 s"):
        starting._store(given, 1, size)
    over.set()


def test_own_store_is_one_of_its_own_clients() -> None:
    store = stores.host_store_at(socket.create_server(("127.0.0.1", 0)))
    store.set("key", "value")
    again = stores.connect_to_store("127.0.0.1", store.port, PATIENCE)
    assert again.get("key") == b"value"
