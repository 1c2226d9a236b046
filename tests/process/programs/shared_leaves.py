"""Several threads use the same leaf, in ways in which torch 2.13 by itself deadlocks.

One of them has torch make the leaf's accumulator, which takes a mutex of the leaf and then the
GIL; another one has the GIL and takes that mutex.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer
from farcall.testing.cluster import acting_as, cluster

TIMES = 3000

_parameters: dict[str, torch.nn.Parameter] = {}


def make(name: str, size: int) -> rpc.RRef[Any]:
    _parameters[name] = torch.nn.Parameter(torch.ones(size))
    return rpc.RRef(_parameters[name])


def use() -> None:
    for _ in range(TIMES):
        _parameters["optimized"] * 1


def index() -> None:
    for _ in range(TIMES):
        _parameters["optimized"][1:]


def size_of(x: torch.Tensor) -> int:
    return x.numel()


def of_an_optimizer() -> None:
    """Handlers of a parameter server."""
    rref = rpc.rpc_sync("w1", make, args=("optimized", 4))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    torch.futures.wait_all([rpc.rpc_async("w1", use), rpc.rpc_async("w1", index)])
    del optimizer


def that_are_sent() -> None:
    """Send a large leaf again and again, and use it meanwhile."""
    leaf = torch.ones(2000, requires_grad=True)
    stop = threading.Event()

    def use_it() -> None:
        while not stop.is_set():
            leaf * 1

    thread = threading.Thread(target=use_it)
    thread.start()
    for _ in range(TIMES // 10):
        with dist_autograd.context():
            assert rpc.rpc_sync("w1", size_of, args=(leaf,)) == 2000
    stop.set()
    thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    programs: dict[str, Callable[[], None]] = {
        "of_an_optimizer": of_an_optimizer,
        "that_are_sent": that_are_sent,
    }
    with cluster(2, rpc_timeout=600) as (w0, _), acting_as(w0):
        programs[sys.argv[1]]()
    print("done")
