"""Puts a simulated system in the place of the real one, in farcall's own modules only."""

from __future__ import annotations

import contextlib
import gc
import os
import random as real_random
import secrets as real_secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from random import Random
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed

import farcall.threads
from farcall.runtime.membership import hosts
from farcall.runtime.threads import bell
from farcall.transport import forks, spin, waiter, watch
from farcall.transport.connect import guests
from simulator.system.files import Kernel
from simulator.system.locks import Threading, me_of
from simulator.system.network import Network
from simulator.system.scheduler import Scheduler
from simulator.system.sockets import Select, Sockets
from simulator.system.store import SimPrefixStore, StoreServer


class System:
    """Hosts, processes, and everything between them.

    Args:
        seed: of all that is drawn.
        preempts: see `Scheduler`.
        slowest: seconds that a message takes at most.
    """

    def __init__(self, seed: int, preempts: float, slowest: float) -> None:
        self.random = Random(seed)
        self.scheduler = Scheduler(self.random, preempts)
        self.network = Network(self.scheduler, self.random, slowest)
        self.kernel = Kernel(self.network)
        self.threading = Threading(self.scheduler)
        self.store = StoreServer(self.network, self.network.add_host("store"))


# Constants that are others here: what takes no time need not be watched each millisecond.
_SETTINGS: tuple[tuple[ModuleType, str, Any], ...] = (
    (waiter, "HAS_EVENTFD", False),
    (watch, "SHORT_PAUSE_SECONDS", 0.02),
    (watch, "LONG_PAUSE_SECONDS", 0.1),
    (watch, "QUIET_LOOKS", 2),
)


_BEGINNING = 1.7e9  # what the clocks of hosts say first, in seconds since 1970


class _Secrets:
    def __init__(self, random: Random) -> None:
        self._random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(real_secrets, name)

    def randbits(self, count: int) -> int:
        return self._random.getrandbits(count)

    def randbelow(self, end: int) -> int:
        return self._random.randrange(end)

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def token_hex(self, count: int) -> str:
        return self._random.randbytes(count).hex()


class _Os:
    """`os`, without what makes real descriptors, or differs from run to run."""

    @staticmethod
    def getpid() -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("eventfd"):
            raise AttributeError(name)
        return getattr(os, name)


def _table(system: System) -> dict[int, Any]:
    """Return the replacements, by the identity of the real objects."""
    scheduler = system.scheduler
    clock = SimpleNamespace(
        monotonic=scheduler.look_at_clock,
        sleep=lambda seconds: scheduler.sleep(scheduler.now + max(0.0, seconds)),
        perf_counter=time.perf_counter,
        time=lambda: _BEGINNING + scheduler.now,
    )

    def host_id() -> str:
        return f"{me_of(scheduler).process.host}/sim"

    draw = Random(system.random.getrandbits(64))
    prefix_store = torch.distributed.PrefixStore  # type: ignore[attr-defined]  # as in stores.py
    pairs: list[tuple[Any, Any]] = [
        (threading, system.threading),
        (time, clock),
        (monotonic, scheduler.look_at_clock),
        (socket, Sockets(system.kernel)),
        (select, Select(system.kernel)),
        (real_random, draw),
        (real_secrets, _Secrets(draw)),
        (os, _Os()),
        (farcall.threads.FarcallThread, system.threading.FarcallThread),
        (farcall.threads.is_main_thread, system.threading.is_main_thread),
        (bell.Bell, bell.LockBell),
        (forks.keep_from_children, lambda sock: None),
        (spin.spare_cores, lambda: 0),
        (guests.descriptor_limit, lambda: sys.maxsize),
        (hosts.host_id, host_id),
        (prefix_store, SimPrefixStore),
    ]
    return {id(real): simulated for real, simulated in pairs}


@contextlib.contextmanager
def installed(system: System) -> Iterator[None]:
    """Run farcall on a simulated system, inside the block. One at a time in a process."""
    table = _table(system)
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for module, key, value in _SETTINGS:
        undo.append((vars(module), key, vars(module)[key]))
        vars(module)[key] = value
    for name, module in list(sys.modules.items()):
        if not name.startswith("farcall."):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in table:
                undo.append((vars(module), key, value))
                vars(module)[key] = table[id(value)]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        for namespace, key, value in undo:
            namespace[key] = value
