"""A worker whose program ends while a function of it is still running.

usage: ends_busy.py ENDING FUNCTION TRANSPORT INIT_METHOD
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from farcall import rpc
from farcall.errors import RendezvousTimeout
from farcall.runtime.current import current_agent
from farcall.runtime.membership.stores import bounded

started = threading.Event()


def products() -> None:
    """Make many short stays in C++."""
    a = torch.rand(300, 300)
    started.set()
    while True:
        a = torch.mm(a, a).clamp_(0, 1)


def long_products() -> None:
    """Is in C++ all the time, also when `exit` runs."""
    a = torch.rand(3000, 3000)
    started.set()
    while True:
        torch.mm(a, a)


def sleeps() -> None:
    started.set()
    while True:
        time.sleep(0.0005)


def spins() -> None:
    started.set()
    while True:
        pass


class Endless(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, work: Any) -> torch.Tensor:
        Endless.work = work
        return x * 2

    @staticmethod
    def backward(*_: Any) -> Any:
        Endless.work()

    work: Any


def backward_in_cpp() -> None:
    """C++ under Python under C++."""
    Endless.apply(torch.ones(3, requires_grad=True), products).sum().backward()


def backward_in_python() -> None:
    """Python under C++, whose destructors use Python."""
    Endless.apply(torch.ones(3, requires_grad=True), sleeps).sum().backward()


def waits_for_torch() -> None:
    started.set()
    torch.futures.Future().wait()


def nothing() -> None:
    started.set()


def store() -> None:
    """Wait in torch's store for what never comes: `bounded` leaves its thread behind."""
    started.set()
    meeting = HashStore()
    try:
        bounded(
            lambda: meeting.wait(["never"], timedelta(seconds=1)), 0.1, RendezvousTimeout("late")
        )
    except RendezvousTimeout:
        print("the store is late", flush=True)


def end(ending: str) -> None:
    how = ending.removeprefix("shutdown, ")
    if how != ending:
        current_agent().close(patience=0.1)  # `shutdown` alone would wait five seconds for them
        rpc.shutdown(graceful=False)
    if how == "error":
        raise ValueError("mine")
    if how == "exit":
        sys.exit(3)
    if how == "text":
        sys.exit("a reason")
    if how == "raise":
        raise SystemExit(5)
    if how == "interrupt":
        raise KeyboardInterrupt


if __name__ == "__main__":
    atexit.register(lambda: print("handlers ran", flush=True))
    c = ctypes.CDLL(None)  # as C++ registers the destructor of a static object
    c.__cxa_atexit(c.puts, ctypes.c_char_p(b"static objects destroyed"), None)
    ending, function, transport, init_method = sys.argv[1:]
    options = rpc.RpcBackendOptions(init_method=init_method, transports=(transport,))
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    if function == "store":
        store()
    else:
        for _ in range(2):
            call = rpc.rpc_async("alone", globals()[function], timeout=0)
            call.add_done_callback(lambda _: None)
        started.wait()
    sys.stdout.write("not flushed")
    end(ending)
