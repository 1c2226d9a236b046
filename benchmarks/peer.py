"""One measurement process pair: rank 0 calls, rank 1 answers. Started by `run.py`.

    python benchmarks/peer.py {farcall|torch|local} CASE,CASE...

Prints one JSON object: case -> list of seconds per call, or per iteration of a training case.
`local` is one process alone, and knows the training cases only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from rnn import MODULES, REAL, TINY, Size, train, train_here

LOCAL = "local"
# Model, iterations that count, iterations before them.
TRAINING: dict[str, tuple[Size, int, int]] = {
    "rnn_tiny": (TINY, 400, 40),
    "rnn_real": (REAL, 12, 3),
}


def noop() -> None:
    pass


def echo(value: Any) -> Any:
    return value


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count


def timed(call: Callable[[], Any], repeats: int, warmup: int) -> list[float]:
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def case_noop(rpc: Any) -> list[float]:
    return timed(lambda: rpc.rpc_sync("worker1", noop), 2000, 200)


def case_echo4(rpc: Any) -> list[float]:
    tensor = torch.rand(4)
    return timed(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)), 2000, 200)


def case_rref_method(rpc: Any) -> list[float]:
    counter = rpc.remote("worker1", Counter)
    return timed(lambda: counter.rpc_sync().add(1), 1000, 100)


def case_echo_1mb(rpc: Any) -> list[float]:
    tensor = torch.rand(1 << 18)
    return timed(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)), 100, 10)


def case_echo_16mb(rpc: Any) -> list[float]:
    tensor = torch.rand(1 << 22)
    return timed(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)), 20, 3)


def case_in_flight(rpc: Any) -> list[float]:
    """5,000 asynchronous calls at once; seconds per call."""
    count = 5000

    def burst() -> None:
        torch.futures.wait_all([rpc.rpc_async("worker1", noop) for _ in range(count)])

    return [seconds / count for seconds in timed(burst, 3, 1)]


def case_references(rpc: Any) -> list[float]:
    """2,000 references made, confirmed and dropped; seconds per reference."""
    count = 2000

    def burst() -> None:
        made = [rpc.remote("worker1", noop) for _ in range(count)]
        made[-1].to_here()

    return [seconds / count for seconds in timed(burst, 3, 1)]


CASES = {name[5:]: function for name, function in list(globals().items()) if name[:5] == "case_"}


def measure(implementation: str, case: str, rpc: Any) -> list[float]:
    if case not in TRAINING:
        return CASES[case](rpc)
    torch.manual_seed(0)
    if implementation == LOCAL:
        return train_here(*TRAINING[case])
    return train(implementation, "worker1", *TRAINING[case])


def worker(rank: int, implementation: str, cases: list[str], store: str, out: str) -> None:
    torch.set_num_threads(1)
    rpc = None
    if implementation != LOCAL:
        rpc = importlib.import_module(MODULES[implementation][0])
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        results = {case: measure(implementation, case, rpc) for case in cases}
        with open(out, "w") as file:
            json.dump(results, file)
    if rpc is not None:
        rpc.shutdown()


def main() -> None:
    implementation, cases = sys.argv[1], sys.argv[2].split(",")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        arguments = (implementation, cases, os.path.join(folder, "store"), out)
        mp.spawn(worker, args=arguments, nprocs=1 if implementation == LOCAL else 2)
        with open(out) as file:
            print(file.read())


if __name__ == "__main__":
    main()
