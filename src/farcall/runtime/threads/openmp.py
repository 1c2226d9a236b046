"""Make idle OpenMP threads sleep soon while calls are frequent.

torch computes in parallel regions of OpenMP. After each region the threads of libgomp's team
busy-wait for the next one, for some milliseconds, and hold the cores that an answer needs: this
worker's own threads, and the other workers of the host. libgomp busy-waits a three-hundredth of
that if the process has more OpenMP threads than cores (`gomp_throttled_spin_count` in libgomp's
`env.c`, `gomp_managed_threads` in its `team.c`). torch.distributed.rpc gets there by chance: each
of its handler threads that computes has a team of its own. An agent does not, since its leader
thread runs nearly all functions. So while calls are frequent, a thread of the agent keeps a small
idle team.

The price is paid by programs that compute much between calls: each parallel region then wakes
sleeping threads. Hence nothing is done where calls are rare, where torch leaves half of the cores
to others, or where the environment tells OpenMP how to wait. docs/performance.md has the numbers.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from functools import partial
from pathlib import Path

import torch

from farcall.log import get_logger
from farcall.threads import FarcallThread
from farcall.transport.spin import spare_cores

_log = get_logger("farcall")

FREQUENT_SECONDS = 5e-3
FREQUENT_CALLS = 4  # in a row, each within `FREQUENT_SECONDS` of the one before
QUIET_SECONDS = 0.25
RETRY_SECONDS = 1.0  # after which it is asked again how many threads torch computes with

_USER_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def find_libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch computes with, or None if it computes with another library."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (AttributeError, OSError):
        return None
    # Intel's and LLVM's libraries have GNU's entry points, too.
    is_gnu = hasattr(library, "GOMP_parallel") and not hasattr(library, "kmp_set_blocktime")
    return library if is_gnu else None


def leaves_cores_free() -> bool:
    """Return whether torch computes on at most half of the cores that this process may use."""
    return torch.get_num_threads() <= (spare_cores() + 1) / 2


def size_of_idle_team() -> int:
    """Return the smallest team with which OpenMP has more threads than cores; 0: none is of use.

    libgomp counts the calling thread's team in full, and of another team all threads but one.
    """
    cores = spare_cores() + 1
    threads = torch.get_num_threads()
    is_of_use = 1 < threads <= cores and not leaves_cores_free()
    return cores - threads + 2 if is_of_use else 0


class IdleTeam:
    """An idle team of OpenMP threads that exists while calls are frequent.

    Thread-safe.

    Attributes:
        asks_at: from that time on (`time.monotonic()` seconds) who makes or serves a call passes
            the time to `note`. Read without a lock at each call.
    """

    def __init__(self, name: str, *, enabled: bool) -> None:
        self._name = f"farcall-openmp-{name}"
        self._gomp: ctypes.CDLL | None = None
        self._is_enabled = enabled and not any(name in os.environ for name in _USER_SETTINGS)
        self.asks_at = 0.0 if self._is_enabled else math.inf
        self._is_held = False
        self._last = 0.0
        self._in_a_row = 0
        self._lock = threading.Lock()  # guards starting and closing
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def note(self, now: float) -> None:
        """Note that a call begins, or arrived, at `now` (`time.monotonic()` seconds)."""
        if self._is_held:
            self.asks_at = math.inf
            return
        is_frequent = now - self._last < FREQUENT_SECONDS
        self._last = now
        self._in_a_row = self._in_a_row + 1 if is_frequent else 0
        if self._in_a_row >= FREQUENT_CALLS:
            self._in_a_row = 0
            self._hold(now)

    def close(self, deadline: float) -> None:
        """End the team, waiting for its thread until `deadline` at most."""
        with self._lock:
            self._closed.set()
            self._is_enabled = False
            self.asks_at = math.inf
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _hold(self, now: float) -> None:
        threads = size_of_idle_team()
        if not threads:
            self.asks_at = now + RETRY_SECONDS
            return
        with self._lock:
            if self._is_held or not self._is_enabled:
                return
            self._gomp = self._gomp or find_libgomp()
            if self._gomp is None:
                self._is_enabled = False
                self.asks_at = math.inf
                return
            thread = FarcallThread(partial(self._keep, self._gomp, threads), self._name)
            refused = thread.try_start()
            if refused is None:
                self._thread = thread
                self._is_held = True
        if refused is not None:  # calls go on without
            _log.debug("%s: %s", self._name, refused)

    def _keep(self, gomp: ctypes.CDLL, threads: int) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of a null pointer
        gomp.GOMP_parallel(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        _log.debug("%s: calls are frequent: idle OpenMP threads sleep soon", self._name)
        is_used = True
        while is_used and not self._closed.is_set():
            self.asks_at = 0.0
            self._closed.wait(QUIET_SECONDS)
            is_used = self.asks_at == math.inf
        # The team ends with this thread.
        with self._lock:
            self._thread = None
            self._is_held = False
            self.asks_at = 0.0 if self._is_enabled else math.inf
        _log.debug("%s: calls are rare: idle OpenMP threads busy-wait as usual", self._name)
