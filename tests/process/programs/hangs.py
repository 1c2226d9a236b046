"""A group of three workers that hangs in a way of its own. Used by test_monitor.py.

    python hangs.py NAME STORE

It prints "PID", the process id of rank 0, when the hang is there, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

from farcall import rpc
from farcall.monitor.finding import STATES, state_of

SIZE = 3
LOCK = threading.Lock()
QUEUE: queue.Queue[int] = queue.Queue(1)
FILES: list[int] = []
STORE: list[subprocess.Popen[bytes]] = []
LOOPS: list[asyncio.AbstractEventLoop] = []
IS_BLOCKED = threading.Event()
OPEN = ("missing_worker", "stopped_store")  # groups whose workers come and go


def noop() -> None:
    pass


def take_lock() -> None:
    LOCK.acquire()


def need_lock() -> None:
    with LOCK:
        pass


def forever() -> None:
    threading.Event().wait()


def put_twice() -> None:
    QUEUE.put(1)
    QUEUE.put(2)


def ask(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def ask_repeatedly(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_async(to, function, args, retry=3).wait()


def hold_lock_and_ask(to: str, function: Any, *args: Any) -> Any:
    with LOCK:
        return rpc.rpc_sync(to, function, args)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).pause()


@rpc.functions.async_execution
def wait_for_nobody() -> rpc.Future[None]:
    return rpc.Future()


@rpc.functions.async_execution
def run_in_loop(function: Any, *args: Any) -> rpc.Future[None]:
    future: rpc.Future[None] = rpc.Future()

    async def run() -> None:
        future.set_result(await function(*args))

    asyncio.run_coroutine_threadsafe(run(), LOOPS[0])
    return future


def start_loop() -> None:
    LOOPS.append(asyncio.new_event_loop())
    threading.Thread(target=LOOPS[0].run_forever, name="loop", daemon=True).start()


async def block_loop() -> None:
    IS_BLOCKED.set()
    threading.Event().wait()


async def call(to: str) -> None:
    await rpc.rpc_async(to, noop)


def wait_for_block() -> None:
    IS_BLOCKED.wait()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != STATES["T"]:
        pass


def lock_held() -> None:
    rpc.rpc_sync("w1", take_lock)
    rpc.rpc_async("w1", need_lock)


def deadlock_of_two() -> None:
    rpc.rpc_async("w0", hold_lock_and_ask, ("w1", ask, "w0", need_lock))


def deadlock_of_repeated_calls() -> None:
    rpc.rpc_async("w0", hold_lock_and_ask, ("w1", ask_repeatedly, "w0", need_lock))


def circle_of_three() -> None:
    rpc.rpc_async("w0", hold_lock_and_ask, ("w1", ask, "w2", ask, "w0", need_lock))


def stopped_peer() -> None:
    rpc.rpc_sync("w2", stop, (rpc.rpc_sync("w1", os.getpid),))
    rpc.rpc_async("w1", noop)


def gil_held() -> None:
    rpc.rpc_async("w1", noop).wait()
    rpc.rpc_async("w1", hold_the_gil)
    rpc.rpc_async("w1", noop)


def full_pool() -> None:
    for _ in range(20):
        rpc.rpc_async("w1", forever)


def full_queue() -> None:
    rpc.rpc_async("w1", put_twice)


def lost_future() -> None:
    rpc.rpc_async("w1", wait_for_nobody)


def blocked_loop() -> None:
    rpc.rpc_sync("w1", start_loop)
    rpc.rpc_async("w1", run_in_loop, (block_loop,))
    rpc.rpc_sync("w1", wait_for_block)
    for _ in range(2):
        rpc.rpc_async("w1", run_in_loop, (call, "w2"))


def endless_function() -> None:
    rpc.rpc_async("w1", ask, ("w2", forever))


def enter_barrier() -> None:
    rpc.barrier(timeout=0)


def missed_barrier() -> None:
    rpc.rpc_async("w1", enter_barrier)
    threading.Thread(target=enter_barrier, daemon=True).start()


def no_files() -> None:
    rpc.rpc_sync("w1", open_all_files)
    rpc.rpc_async("w1", forever)


def open_all_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, most))
    with suppress(OSError):
        while True:
            FILES.append(os.open(os.devnull, os.O_RDONLY))


def missing_worker() -> None:
    threading.Thread(target=rpc.wait_for, args=("w9",), kwargs={"timeout": 0}, daemon=True).start()


def stopped_store() -> None:
    stop(STORE[0].pid)
    threading.Thread(target=rpc.rpc_sync, args=("w9", noop), daemon=True).start()


def forgotten_shutdown() -> None:
    threading.Thread(target=rpc.shutdown, daemon=True).start()


HANGS = {
    function.__name__: function
    for function in (
        lock_held,
        deadlock_of_two,
        deadlock_of_repeated_calls,
        circle_of_three,
        stopped_peer,
        gil_held,
        full_pool,
        full_queue,
        lost_future,
        blocked_loop,
        endless_function,
        missed_barrier,
        no_files,
        missing_worker,
        stopped_store,
        forgotten_shutdown,
    )
}


def run(rank: int, store: str, name: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=store, num_worker_threads=4, rpc_timeout=600
    )
    if name == "missing_rank" and rank == 2:
        forever()
    if rank == 0:
        print(os.getpid(), flush=True)
    if name in OPEN:
        rpc.init_rpc(f"w{rank}", rank=rank + 1, rpc_backend_options=options)
        rpc.wait_for("w1", "w2")
    else:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=SIZE, rpc_backend_options=options)
    if rank == 0:
        HANGS[name]()
    forever()


def main() -> None:
    name, file = sys.argv[1:]
    store = f"file://{file}"
    if name == "stopped_store":
        command = [sys.executable, "-m", "farcall.processes.store", "127.0.0.1", "0"]
        STORE.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        store = f"tcp://127.0.0.1:{int(STORE[0].stdout.readline())}"
    context = get_context("fork")
    workers = [context.Process(target=run, args=(rank, store, name)) for rank in range(SIZE)]
    for worker in workers:
        worker.start()
    sys.stdin.read()
    for worker in (*workers, *STORE):
        worker.kill()


if __name__ == "__main__":
    main()
