"""Steps of a process that is no worker, and listens where one would: it answers what it likes.

And of one that asks a worker, of the same user and without the secret. Both know farcall's
insides by `attacker.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacker
import msgspec

from farcall.runtime.inspection.reports import MAX_REPORT

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n[/red][link=file:///x]"
DEEP = 100_000
MANY = 40_000
INVENTED = 20_000
_PAUSE = threading.Event()  # of slow ones; never set


def _report(**fields: Any) -> bytes:
    """Return the report of a worker, as msgpack."""
    usual = {
        **{"name": "impostor", "id": 7, "incarnation": 7, "host": "here", "pid": os.getpid()},
        **{"versions": "none", "age": 1.0, "memory": 1, "descriptors": (1, 1), "state": "works"},
    }
    return msgspec.msgpack.encode(usual | fields)


def _member(number: int, **fields: Any) -> dict[str, Any]:
    usual = {
        **{"name": f"m{number}", "id": number, "incarnation": 100 + number, "host": "there"},
        **{"pid": 1, "addresses": (), "path": "", "in_flight": 0, "unsent": 0, "is_read": True},
        "loss_cause": "",
    }
    return usual | fields


def _call(number: int, **fields: Any) -> dict[str, Any]:
    usual = {"function": "f", "worker": "impostor", "call_id": number, "seconds": 9.0}
    return usual | {"limit": 0.0, "state": "runs"} | fields


def _escapes() -> bytes:
    call = _call(1, function=ESCAPE, worker=ESCAPE)
    thread = {
        **{"name": ESCAPE, "id": 1, "frames": [ESCAPE], "place": ESCAPE, "serves": call},
        **{"waits_for": _call(2, function=ESCAPE), "awaits": {"what": ESCAPE, "seconds": 5.0}},
    }
    return _report(
        **dict.fromkeys(("host", "versions", "role", "shortage", "transport"), ESCAPE),
        waits_for=[ESCAPE], paths=(ESCAPE,), references={ESCAPE: 1}, calls=[call], served=[call],
        threads=[thread], members=[_member(1, name=ESCAPE, path=ESCAPE, drawback=ESCAPE,
                                           host=ESCAPE, losses=1, unsent=1, protection=ESCAPE)],
        gatherings=[{"what": ESCAPE, "seconds": 9.0, "come": [ESCAPE], "missing": [ESCAPE]}],
    )  # fmt: skip


def _ring() -> bytes:
    """Return calls each of which waits for the next, and the last one for the first."""
    calls = [_call(number) for number in range(MANY)]
    threads = [
        {
            **{"name": "t", "id": 0, "frames": [], "place": "p"},
            **{"serves": one, "waits_for": calls[number - 1]},
        }
        for number, one in enumerate(calls[: MANY // 10])
    ]
    return _report(calls=calls, served=calls, threads=threads)


def _nested() -> bytes:
    fields = _report()
    assert fields[0] & 0xF0 == 0x80
    return bytes([fields[0] + 1]) + fields[1:] + b"\xa1x" + b"\x91" * DEEP + b"\xc0"


def _inventions(kind: str) -> bytes:
    """Return a report with many members, all of them at one port of this host."""
    address = f"tcp://127.0.0.1:{kind.split()[1]}"
    return _report(members=[_member(number, addresses=(address,)) for number in range(INVENTED)])


# Bytes that are sent in the place of a report.
REPORTS: dict[str, Callable[[], bytes]] = {
    "no report": lambda: b"\xc1",
    "no text": lambda: _report().replace(b"impostor", b"\xff" * 8),
    "nested": _nested,
    "no number": lambda: _report(age=float("nan")),
    "no number of descriptors": lambda: _report(descriptors=(2**63, -(2**63))),
    "endless age": lambda: _report(age=float("inf")),
    "no name": lambda: _report(name=ESCAPE),
    "escapes": _escapes,
    "ring": _ring,
    "many texts": lambda: _report(waits_for=["x"] * (MAX_REPORT // 2 - 1000)),
    "many keys": lambda: _report(references={f"{n:x}": 1 for n in range(MAX_REPORT // 24)}),
}
# Manners in which an impostor treats a connection.
MANNERS = (
    *("closes", "silent", "full", "garbage", "announces"),
    *("says hello byte by byte", "goes on for long"),
)


def listen(kind: str, name: str) -> None:
    """Listen as a worker does, and answer as `kind` says, until this process is killed.

    Args:
        name: after the zero byte.
    """
    said = b""
    if kind in REPORTS or kind.startswith("invents"):
        said = _inventions(kind) if kind.startswith("invents") else REPORTS[kind]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0 if kind == "full" else 512)
        if kind == "full":
            there = []
            for _ in range(2):
                there.append(socket.socket(socket.AF_UNIX))
                there[-1].setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    there[-1].connect(f"\0{name}")
            _PAUSE.wait()
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer, args=(kind, said, sock), daemon=True).start()


def name_like_a_workers() -> str:
    return f"farcall-{secrets.token_hex(16)}"


def wait_for(name: str) -> None:
    """Return when a process of this host listens there."""
    while not any(
        line.endswith(f" @{name}") and " 00010000 " in line
        for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()
    ):
        _PAUSE.wait(0.01)


_listeners: list[socket.socket] = []


def accept_nothing() -> int:
    """Listen at a port of this host from now on, and say nothing to those that connect."""
    _listeners.append(socket.create_server(("127.0.0.1", 0), backlog=512))
    return int(_listeners[-1].getsockname()[1])


def _answer(kind: str, said: bytes, sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        if said:
            attacker.accept_asker(sock)
            sock.sendall(len(said).to_bytes(4, "little") + said)
            while sock.recv(1 << 16):
                pass
        elif kind == "silent":
            _PAUSE.wait()
        elif kind == "garbage":
            sock.sendall(secrets.token_bytes(1 << 16))
        elif kind == "announces":
            attacker.accept_asker(sock)
            sock.sendall(b"\xff" * 4)
            _PAUSE.wait()
        elif kind == "says hello byte by byte":
            _trickle(sock, attacker.plain_hello())
        elif kind == "goes on for long":
            attacker.accept_asker(sock)
            _trickle(sock, MAX_REPORT.to_bytes(4, "little") + bytes(MAX_REPORT))


def _trickle(sock: socket.socket, data: bytes) -> None:
    for byte in data:
        sock.sendall(bytes([byte]))
        _PAUSE.wait(0.02)


# Of a process that asks.

_QUESTION = msgspec.msgpack.encode((True, ""))
# The bytes behind the handshake of a process that asks, or None for one that leaves.
QUESTIONS: dict[str, bytes | None] = {
    "leaves": None,
    "silent": b"",
    "half a length": b"\x08\0",
    "enormous": b"\xff" * 4 + bytes(1 << 10),
    "no question": b"\x08\0\0\0\x92\xc3\xa5\xff\xff\xff\xff\xff",
    "nested": (1 << 10).to_bytes(4, "little") + b"\x91" * (1 << 10),
    "reads nothing": len(_QUESTION).to_bytes(4, "little") + _QUESTION,
}


def ask(url: str, kind: str, begun: str, stop: str) -> int:
    """Ask as fast as possible until a file is there, and keep a hundred connections; how often?

    Args:
        kind: one of QUESTIONS.
        begun: path of a file that is made after the first hundred.
        stop: path of the file that ends it.
    """
    question, count = QUESTIONS[kind], 0
    there: deque[socket.socket] = deque()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [sock.close() for sock in there])
        while not (count % 20 == 0 and os.path.exists(stop)):
            with contextlib.suppress(OSError):
                there.append(attacker.begin_to_ask(url))
                if question:
                    there[-1].sendall(question)
            if there and (question is None or len(there) > 100):
                there.popleft().close()
            count += 1
            if count == 100:
                Path(begun).touch()
    return count


def trickle(url: str, connections: int, begun: str) -> int:
    """Ask over so many connections, with a byte each now and then, until all are cut off.

    Returns:
        How many bytes were said then.
    """
    question = (1 << 10).to_bytes(4, "little") + bytes(1 << 10)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(attacker.begin_to_ask(url)) for _ in range(connections)]
        for number in range(len(question)):
            for sock in list(socks):
                try:
                    sock.sendall(question[number : number + 1])
                except OSError:
                    socks.remove(sock)
            if not socks:
                return number
            Path(begun).touch()
            _PAUSE.wait(0.1)
    raise AssertionError("the worker has heard it all")
