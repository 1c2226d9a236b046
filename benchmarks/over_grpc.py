"""gRPC in the shape of torch.distributed.rpc: a generic method that takes and gives bytes.

Over Unix sockets, with a server of 16 threads, as many as torch.distributed.rpc has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from packed import pack_call, run_packed, unpack

THREADS = 16
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SERVER_OPTIONS = [
    *OPTIONS,
    # Else it cancels calls when some thousand are in flight.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]
JOIN_SECONDS = 60.0


def address(store: str, rank: int) -> str:
    return f"unix:{store}-{rank}"


class Future:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> Any:
        return unpack(self._future.result())


class Caller:
    """Rank 0."""

    def __init__(self, store: str, size: int) -> None:
        self._channels = [
            grpc.insecure_channel(address(store, rank), OPTIONS) for rank in range(1, size)
        ]
        self._methods = {}
        for rank, channel in enumerate(self._channels, start=1):
            grpc.channel_ready_future(channel).result(JOIN_SECONDS)
            self._methods[f"worker{rank}"] = channel.unary_unary("/calls/run")

    def rpc_sync(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return unpack(self._methods[to](pack_call(function, args)))

    def rpc_async(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return Future(self._methods[to].future(pack_call(function, args)))

    def shutdown(self) -> None:
        for channel in self._channels:
            channel.unary_unary("/calls/end")(b"")
            channel.close()


class Server:
    """Any other rank."""

    def __init__(self, store: str, rank: int) -> None:
        self._end = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(THREADS), options=SERVER_OPTIONS)
        methods = {
            "run": grpc.unary_unary_rpc_method_handler(lambda data, _: run_packed(data)),
            "end": grpc.unary_unary_rpc_method_handler(self._ended),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("calls", methods),)
        )
        self._server.add_insecure_port(address(store, rank))
        self._server.start()

    def _ended(self, _data: bytes, _context: grpc.ServicerContext) -> bytes:
        self._end.set()
        return b""

    def shutdown(self) -> None:
        self._end.wait()
        self._server.stop(grace=1.0).wait()


def join(store: str, size: int, rank: int) -> Caller | Server:
    return Server(store, rank) if rank else Caller(store, size)
