"""A process that was forked from a worker must not act as that worker.

Forks in the driver of a group, in a function on a worker, and in a process that has all workers.
The child uses whatever it has inherited. Prints what each use raised, then what the parent's own
uses still give.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import farcall
from farcall import rpc

FORK = multiprocessing.get_context("fork")


class Store:
    def get(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Remote(Dataset[torch.Tensor]):
    """Gets its items by a reference."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        got: torch.Tensor = self.rref.rpc_sync().get(index)
        return got


def wait(number: int) -> int:
    while not rpc.cancelled():
        torch.tensor(number)
    return number


def uses(other: str) -> tuple[list[Any], dict[str, Callable[[], Any]]]:
    """Return what a worker has, and the uses of it that reach for other workers."""
    there = rpc.remote(other, Store)
    handle = farcall.spawn(other, Store)
    own = rpc.RRef([1])
    pending = rpc.rpc_async(other, wait, args=(1,))
    behind = pending.then(lambda done: done.value())
    assert there.rpc_sync().get(2) == 2
    assert handle.get.sync(3) == 3
    options = rpc.RpcBackendOptions(init_method="tcp://127.0.0.1:0", insecure=True)
    found = {
        "rpc_sync": lambda: rpc.rpc_sync(other, abs, args=(-1,)),
        "rpc_async": lambda: rpc.rpc_async(other, abs, args=(-1,)),
        "remote": lambda: rpc.remote(other, abs, args=(-1,)),
        "self": lambda: rpc.rpc_sync(rpc.get_worker_info(), abs, args=(-1,)),
        "rref.rpc_sync": lambda: there.rpc_sync().get(1),
        "rref.rpc_async": lambda: there.rpc_async().get(1),
        "rref.remote": lambda: there.remote().get(1),
        "rref.to_here": there.to_here,
        "own.rpc_sync": lambda: own.rpc_sync().copy(),
        "RRef": lambda: rpc.RRef(1),
        "handle": lambda: handle.get(1),
        "handle.sync": lambda: handle.get.sync(1),
        "future.wait": pending.wait,
        "future.cancel": pending.cancel,
        "await": lambda: asyncio.run(awaited(pending)),
        "then": behind.wait,
        "await then": lambda: asyncio.run(awaited(behind)),
        "then of then": lambda: behind.then(print).wait(),
        "get_worker_info": lambda: rpc.get_worker_info(other),
        "workers": rpc.workers,
        "barrier": rpc.barrier,
        "get_object": lambda: rpc.get_object("nothing"),
        "shutdown": rpc.shutdown,
        "init_rpc": lambda: begin_anew(options),
    }
    return [there, handle, pending], found


async def awaited(future: rpc.Future[Any]) -> Any:
    return await future


def begin_anew(options: rpc.RpcBackendOptions) -> None:
    """Become a worker of another group, as any process may."""
    rpc.init_rpc("anew", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("anew", abs, args=(-1,)) == 1
    rpc.shutdown()
    raise rpc.NotInitialized("no more")


def outcome(use: Callable[[], Any]) -> str:
    try:
        return f"returned {use()!r}"
    except Exception as error:
        return type(error).__name__


def in_child(use: Callable[[], Any]) -> str:
    """Return the outcome of a use in a forked process."""
    here, there = FORK.Pipe(duplex=False)
    child = FORK.Process(target=lambda: there.send(outcome(use)))
    child.start()
    there.close()
    try:
        said: str = here.recv()
    except EOFError:
        said = "died"
    child.join()
    return said


def from_loader(rref: Any) -> Any:
    return list(DataLoader(Remote(rref), num_workers=1, multiprocessing_context=FORK))


def check(where: str, other: str) -> None:
    (there, handle, pending), found = uses(other)
    wrong = {
        name: said for name, use in found.items() if (said := in_child(use)) != "NotInitialized"
    }
    print(where, "wrong:", wrong, flush=True)
    print(where, "loader:", outcome(lambda: from_loader(there)), flush=True)
    print(where, "pending:", not pending.done() and pending.cancel(), flush=True)
    print(where, "parent:", int(there.rpc_sync().get(4)), int(handle.get.sync(5)), flush=True)


def come_back(how: str) -> int:
    """Return the exit code of a forked process that comes back from the function."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if how == "raise":
        raise ValueError("in the child")
    if how == "exit":
        sys.exit(7)
    return -1


def come_back_from_callback(how: str) -> int:
    """Return the exit code of a forked process that comes back from a callback of a future."""

    def fork(_: object) -> int:
        child = os.fork()
        if not child and how == "raise":
            raise ValueError("in the child")
        return child

    child = rpc.rpc_async("worker1", abs, args=(-1,)).then(fork).wait()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


KEPT: dict[str, Any] = {}  # of the workers of this process


def keep(other: str) -> None:
    """Keep what a worker of this process has."""
    KEPT.update(
        rref=rpc.remote(other, Store), own=rpc.RRef([1]), pending=rpc.rpc_async(other, wait, (1,))
    )
    KEPT["behind"] = KEPT["pending"].then(lambda done: done.value())


def check_threads() -> None:
    """Check that a child has none of the workers of a process that has all."""
    with farcall.local(2, processes=False) as group:
        group[0].call(keep, "worker1")
        uses = {
            "rpc_sync": lambda: KEPT["rref"].rpc_sync().get(1),
            "to_here": KEPT["rref"].to_here,
            "own": lambda: KEPT["own"].rpc_sync().copy(),
            "wait": KEPT["pending"].wait,
            "then": KEPT["behind"].wait,
            "group": lambda: group[0].call(abs, -1),
        }
        outcomes = {name: in_child(use) for name, use in uses.items()}
        wrong = {name: said for name, said in outcomes.items() if said != "NotInitialized"}
        print("threads wrong:", wrong, flush=True)
        print("threads parent:", int(KEPT["rref"].rpc_sync().get(4)), flush=True)
        KEPT["pending"].cancel()
        KEPT.clear()


def main() -> None:
    check_threads()
    with farcall.local(2) as group:
        check("driver", "worker1")
        group[0].call(check, "worker", "worker1")
        print([group[0].call(come_back, how) for how in ("return", "raise", "exit")])
        print([group[0].call(come_back_from_callback, how) for how in ("return", "raise")])
        print(group.all.call(abs, -1))


if __name__ == "__main__":
    main()
