"""Workers that wait for each other, and one that is late, and then dies."""

from __future__ import annotations

import sys
from multiprocessing.synchronize import Semaphore

import torch.multiprocessing as mp
from torch.distributed import rpc

WORLD_SIZE = 3


def run(rank: int, init_method: str, last: int, waiting: list[Semaphore]) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    seen: list[object] = [sorted(rpc.api._all_gather(rank).items())]
    if rank == last:
        waiting[rank].acquire()  # forever: it is killed
    for seconds in (0.2, -1):
        waiting[rank].release()
        try:
            rpc.api._all_gather(rank, timeout=seconds)
        except RuntimeError as error:
            seen.append(type(error).__name__)
    rpc.shutdown()
    # One write: two workers share the output, and print may write line and end apart.
    sys.stdout.write(f"{seen}\n")
    sys.stdout.flush()


def main(init_method: str, last: int) -> None:
    context = mp.get_context("spawn")
    waiting = [context.Semaphore(0) for _ in range(WORLD_SIZE)]
    processes = [
        context.Process(target=run, args=(rank, init_method, last, waiting))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    others = [rank for rank in range(WORLD_SIZE) if rank != last]
    for rank in others * 2:
        waiting[rank].acquire()
    processes[last].kill()
    for process in processes:
        process.join()
    print([processes[rank].exitcode for rank in others])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
