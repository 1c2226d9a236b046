"""Trainers that get a reference to the server's object, and call its methods through it."""

import os
import sys

import torch
import torch.multiprocessing as mp

from farcall import rpc
from farcall.rpc import RRef, remote, rpc_async

WORLD_SIZE = 4


class Server:
    def __init__(self, size):
        self.parameters = torch.zeros(size)

    def pull(self):
        return self.parameters.clone()

    def push(self, gradient):
        self.parameters += gradient


class Trainer:
    def __init__(self, server: RRef, scale: float):
        self.server = server
        self.scale = scale

    def train(self, steps):
        for _ in range(steps):
            current = self.server.rpc_sync().pull()
            self.server.rpc_sync().push(torch.full_like(current, self.scale))
        return rpc.get_worker_info().name


def run(rank, world_size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    name = {0: "master", 1: "ps"}.get(rank, f"trainer{rank}")
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == 0:
        server = remote("ps", Server, args=(3,))
        trainers = [remote(f"trainer{r}", Trainer, args=(server, float(r))) for r in (2, 3)]
        names = torch.futures.wait_all([t.rpc_async().train(5) for t in trainers])
        values = rpc_async("ps", Server.pull, args=(server.to_here(),)).wait()
        assert torch.equal(values, server.rpc_sync().pull())
        print(*names, values.tolist(), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
