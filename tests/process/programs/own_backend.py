"""A backend of a third party: an endpoint of its own, registered under a name of its own."""

from __future__ import annotations

import sys

import torch.multiprocessing as mp
from torch.distributed import rpc

import farcall.compat
from farcall.ids import Worker
from farcall.runtime.membership.endpoints import EndpointPlace
from farcall.transport.base import Link
from farcall.transport.connect.listening import Listening
from farcall.transport.sockets.endpoint import SocketEndpoint


class NotingEndpoint(SocketEndpoint):
    def __init__(self, me: Worker, listening: Listening, dialled: set[str]) -> None:
        self.dialled = dialled
        super().__init__(me, listening)

    def connect(self, worker: Worker, deadline: float) -> Link:
        self.dialled.add(worker.name)
        return super().connect(worker, deadline)


class NotingOptions(rpc.RpcBackendOptions):
    def open_endpoint(self, place: EndpointPlace) -> NotingEndpoint:
        self.dialled: set[str] = set()
        listening = Listening(listen=place.listen, advertise=place.advertise, admit=place.admit)
        return NotingEndpoint(place.me, listening, self.dialled)


def run(rank: int, init_method: str) -> None:
    backend = rpc.backend_registry.register_backend(
        "NOTING", NotingOptions, farcall.compat.start_agent
    )
    assert backend is rpc.BackendType.NOTING
    options = rpc.construct_rpc_backend_options(backend, init_method=init_method)
    rpc.init_rpc(f"worker{rank}", backend, rank, 2, options)
    if rank == 0:
        value = rpc.rpc_sync("worker1", max, args=(1, 2))
        of_agent = rpc._get_current_rpc_agent()._get_backend_options()
        print(value, options.dialled, of_agent is options, flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
