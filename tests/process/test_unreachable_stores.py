"""Programs whose rendezvous can't be reached end with an error of their own, and without noise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

import pytest
from launching import free_port
from patience import PATIENCE

PROGRAM = """
import sys
from farcall import rpc
rank, url, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
options = rpc.RpcBackendOptions(init_method=url, rpc_timeout=timeout)
print("begins", flush=True)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
rpc.shutdown()
"""


def start(rank: int, url: str, timeout: float, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rank), url, str(timeout)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said


REASONS = {
    "no name": "the name 'no.such.host.invalid' can't be resolved",
    "closed": "Connection refused",
    "silent": "something else listens at 127.0.0.1: it took the connection and said nothing; is",
    "http": "something else listens at 127.0.0.1: it said b'HTTP",
}


@pytest.mark.parametrize("kind", REASONS)
def test_program_ends_with_the_reason_and_its_own_exit_code(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = free_port() if kind == "closed" else server.getsockname()[1]
        host = "no.such.host.invalid" if kind == "no name" else "127.0.0.1"
        timeout = PATIENCE if kind == "http" else 1.0  # an answer ends the search
        process = start(1, f"tcp://{host}:{port}", timeout)
        if kind == "http":
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                code, said = ended(process)
        else:
            code, said = ended(process)
    assert code == 1, said
    *_, reason, address = said.splitlines()
    assert REASONS[kind] in reason
    assert "docs/troubleshooting.md#rendezvous" in address
    assert "c10d" not in said
    assert "TCPStore.cpp" not in said


class Early(NamedTuple):
    """A worker that has waited for the other, longer than torch waits before it prints."""

    url: str
    process: subprocess.Popen[str]


WAITS = [(first, libuv) for first in (0, 1) for libuv in ("0", "1")]


@pytest.fixture(scope="module")
def early() -> Iterator[dict[tuple[int, str], Early]]:
    """Start all of them, so that they wait at the same time."""
    with ExitStack() as stack:
        found = {}
        for first, libuv in WAITS:
            url = f"tcp://127.0.0.1:{free_port()}"
            process = stack.enter_context(start(first, url, PATIENCE, USE_LIBUV=libuv))
            stack.callback(process.kill)
            found[first, libuv] = Early(url, process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(7.0)
        yield found


@pytest.mark.parametrize(("first", "libuv"), WAITS)
def test_worker_that_waits_for_the_other_says_nothing(
    first: int, libuv: str, early: dict[tuple[int, str], Early]
) -> None:
    url, waiting = early[first, libuv]
    assert waiting.poll() is None
    late = start(1 - first, url, PATIENCE, USE_LIBUV=libuv)
    assert ended(late) == (0, "")
    assert ended(waiting) == (0, "")
