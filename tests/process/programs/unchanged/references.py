"""Calls, references and deferred answers, by the names that torch has for them."""

import sys

import torch
import torch.multiprocessing as mp
from torch.distributed import rpc
from torch.distributed.rpc import remote, rpc_async, rpc_sync


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, value):
        self.count += value
        return self.count


@rpc.functions.async_execution
def add_elsewhere(to, x, y):
    return rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + 1)


def count_up(rref):
    return rref.rpc_sync().add(10)


def call_others():
    total = rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    counter = remote("worker1", Counter)
    counts = [counter.rpc_sync().add(1), rpc_sync("worker2", count_up, args=(counter,))]
    chained = rpc_sync("worker1", add_elsewhere, args=("worker2", torch.ones(1), 1))
    names = sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())
    print(rpc.__name__, total.tolist(), counts, chained.item(), names, flush=True)


def run(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        call_others()
    rpc.api._barrier({f"worker{other}" for other in range(3)})
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=3)
