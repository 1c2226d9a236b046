"""RPyC in the shape of torch.distributed.rpc: bytes for calls, netrefs for references.

Over Unix sockets, with one connection for each calling thread, as its server has one thread for
each. Its compression is off: it would only slow down random numbers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import rpyc
from packed import pack_call, run_packed, unpack
from rpyc.core.channel import Channel
from rpyc.utils.server import ThreadedServer

CONFIG = {"allow_public_attrs": True, "sync_request_timeout": None}
JOIN_SECONDS = 60.0

Channel.COMPRESSION_THRESHOLD = sys.maxsize


def path(store: str, rank: int) -> str:
    return f"{store}-{rank}"


def connect(to: str) -> Any:
    """Tries until the server is there."""
    end = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return rpyc.utils.factory.unix_connect(to, config=CONFIG)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.001)


class Future:
    def __init__(self, result: rpyc.AsyncResult) -> None:
        self._result = result

    def wait(self) -> Any:
        return unpack(self._result.value)


class Reference:
    def __init__(self, value: Any) -> None:
        self._value = value

    def rpc_sync(self) -> Any:
        return self._value


class Link:
    """A connection, with its methods looked up."""

    def __init__(self, to: str) -> None:
        self.connection = connect(to)
        self.run = self.connection.root.run
        self.run_async = rpyc.async_(self.run)
        self.make = self.connection.root.make


class Caller:
    """Rank 0."""

    def __init__(self, store: str, size: int) -> None:
        self._paths = {f"worker{rank}": path(store, rank) for rank in range(1, size)}
        self._local = threading.local()
        for worker in self._paths:
            self._link(worker)

    def _link(self, to: str) -> Link:
        links: dict[str, Link] = self._local.__dict__
        if to not in links:
            links[to] = Link(self._paths[to])
        return links[to]

    def rpc_sync(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return unpack(self._link(to).run(pack_call(function, args)))

    def rpc_async(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return Future(self._link(to).run_async(pack_call(function, args)))

    def remote(self, to: str, kind: type) -> Reference:
        return Reference(self._link(to).make(kind.__module__, kind.__qualname__))

    def shutdown(self) -> None:
        for worker in self._paths:
            connection = self._link(worker).connection
            rpyc.async_(connection.root.end)()  # it may be gone before it answers
            connection.close()


class Service(rpyc.Service):
    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def exposed_run(self, data: bytes) -> bytes:
        return run_packed(data)

    def exposed_make(self, module: str, name: str) -> Any:
        return getattr(sys.modules[module], name)()

    def exposed_end(self) -> None:
        self._end.set()


class Server:
    """Any other rank."""

    def __init__(self, store: str, rank: int) -> None:
        self._end = threading.Event()
        socket_path = path(store, rank)
        self._server = ThreadedServer(
            Service(self._end), socket_path=socket_path, protocol_config=CONFIG
        )
        threading.Thread(target=self._server.start, daemon=True).start()

    def shutdown(self) -> None:
        self._end.wait()
        self._server.close()


def join(store: str, size: int, rank: int) -> Caller | Server:
    return Server(store, rank) if rank else Caller(store, size)
