"""Calls of every kind between two real processes, at once and without end, until one of them dies;
and what a process holds of the system, before and after.
"""

from __future__ import annotations

import gc
import operator
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from crew import PATIENCE

from farcall import rpc
from farcall.runtime.current import current_agent

# A worker's own threads come and go with the load: as many as functions may run at once (16), one
# that leads, the watchdog, the acceptor, the spare ones and those of handshakes.
MAX_OWN_THREADS = 40

Held = dict[str, Any]
Differences = dict[str, tuple[Any, Any]]  # before, now

_kept: dict[str, Any] = {}
_steps_left: list[None] = []  # until this process kills itself; popping needs no lock
_mortal = threading.Event()

Kinds = Counter[str]


# Things that a process holds.


def held() -> Held:
    """Descriptors by what they are, mappings of shared memory, links, threads."""
    descriptors: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
        except OSError:
            continue  # that of the listing itself
    maps = Path("/proc/self/maps").read_text()
    names = [thread.name for thread in threading.enumerate()]
    own = [name for name in names if name.startswith("farcall")]
    agent = _kept.get("agent")
    return {
        "descriptors": dict(descriptors),
        "mapped": maps.count("memfd:farcall"),
        "in /dev/shm": maps.count("/dev/shm/"),
        "links": [link.description for link in agent.endpoint.links()] if agent else [],
        "other threads": sorted(set(names) - set(own)),
        "too many own threads": own if len(own) > MAX_OWN_THREADS else [],
        "threads not of Python": len(os.listdir("/proc/self/task")) - len(names),
    }


def prepare() -> Held:
    """Return the things held before `init_rpc`."""
    torch.set_num_threads(1)  # so that all threads are Python's
    return held()


def remember() -> None:
    """Remember the things held now, for `settle`, as soon as no thread begins or ends."""
    _kept["agent"] = current_agent()
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE / 2
    while (before := held())["threads not of Python"] and time.monotonic() < deadline:
        pause.wait(0.01)
    _kept["before"] = before


def is_more(now: Any, before: Any) -> bool:
    """Return whether there are more descriptors; anything else that differs counts as more.

    A file that another thread read at that moment may have been among those of `remember`.
    """
    return not isinstance(now, dict) or bool(Counter(now) - Counter(before))


def settle() -> Differences:
    """Wait until no more is held than at `remember`; return the surplus if that takes too long."""
    differences: Differences = {}
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE / 2
    while time.monotonic() < deadline:
        gc.collect()
        now, before = held(), _kept["before"]
        differences = {
            what: (before[what], now[what])
            for what in now
            if now[what] != before[what] and is_more(now[what], before[what])
        }
        if not differences:
            return {}
        pause.wait(0.01)
    return differences


def leave_and_settle(before: Held) -> Differences:
    """Return the things held after a shutdown that were not held before `init_rpc`."""
    del _kept["agent"]
    rpc.shutdown(graceful=False)
    _kept["before"] = before
    differences = settle()
    own = [t.name for t in threading.enumerate() if t.name.startswith("farcall")]
    return {**differences, "own threads": ([], own)} if own else differences


# Functions that are called remotely.


def _step() -> None:
    """Count one of the steps after which this process is to die; see `run_load`."""
    if _mortal.is_set():
        try:
            _steps_left.pop()
        except IndexError:
            os.kill(os.getpid(), signal.SIGKILL)


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    _step()
    return tensor + 1


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Sent back from the very memory in which it arrived."""
    _step()
    return tensor


def make(size: int, value: float) -> torch.Tensor:
    _step()
    return torch.full((size,), value)


def bounce(back: str, size: int, times: int) -> int:
    """Calls that nest: there and back."""
    _step()
    if times == 0:
        return size
    tensor = torch.ones(size)
    me = rpc.get_worker_info().name
    assert rpc.rpc_sync(back, bounce, args=(me, size, times - 1)) == size
    return int(tensor.sum())


# The callers. Each function makes one round of calls; `kept` holds what arrived for a while.


def _size(draw: random.Random) -> int:
    """Return the size of a float tensor: within a frame, in one segment or stripe, in several."""
    return draw.choice((10, 3_000, 16_000, 60_000, 300_000, 1_000_000))


def call_small(peer: str, draw: random.Random, kept: deque[Any]) -> None:
    for number in range(50):
        _step()
        assert rpc.rpc_sync(peer, operator.add, args=(number, 1)) == number + 1


def call_large(peer: str, draw: random.Random, kept: deque[Any]) -> None:
    size, value = _size(draw), draw.randrange(1000)
    tensor = torch.full((size,), float(value))
    for function, expected in ((add_one, value + 1), (same, value)):
        answer = rpc.rpc_sync(peer, function, args=(tensor,))
        assert answer.shape == (size,)
        assert bool((answer == expected).all())
        kept.append((answer, expected))


def call_many(peer: str, draw: random.Random, kept: deque[Any]) -> None:
    tensors = [torch.full((_size(draw),), float(number)) for number in range(8)]
    futures = [rpc.rpc_async(peer, add_one, args=(tensor,)) for tensor in tensors]
    outcomes = []
    for number, future in enumerate(futures):
        try:
            answer = future.wait()
        except rpc.PeerLost as error:
            outcomes.append(error)
        else:
            assert bool((answer == number + 1).all())
            kept.append((answer, number + 1))
    if outcomes:
        raise outcomes[0]


def call_references(peer: str, draw: random.Random, kept: deque[Any]) -> None:
    size, value = _size(draw), draw.randrange(1000)
    rref = rpc.remote(peer, make, args=(size, float(value)))
    answer = rref.to_here()
    assert answer.shape == (size,)
    assert bool((answer == value).all())
    assert rref.rpc_sync().size(0) == size
    kept.append((answer, value))
    kept.append((rref, None))


def call_nested(peer: str, draw: random.Random, kept: deque[Any]) -> None:
    size = draw.choice((10, 50_000))
    me = rpc.get_worker_info().name
    assert rpc.rpc_sync(peer, bounce, args=(me, size, draw.randrange(3))) == size


CALLERS: tuple[Callable[[str, random.Random, deque[Any]], None], ...] = (
    call_small,
    call_large,
    call_many,
    call_references,
    call_nested,
)


def run_load(peer: str, seed: int, dies_after: int | None) -> Kinds:
    """Call a peer in all ways at once until it is lost. How the rounds of calls ended.

    Args:
        dies_after: kill this process after so many calls, served or made.
    """
    _steps_left[:] = [None] * (dies_after or 0)
    _mortal.set() if dies_after is not None else _mortal.clear()
    kinds: Kinds = Counter()

    def run(number: int) -> None:
        for kind in _outcomes(CALLERS[number], peer, random.Random(seed * 10 + number)):
            kinds[kind] += 1

    threads = [
        threading.Thread(target=run, args=(number,), name=f"caller {number}", daemon=True)
        for number in range(len(CALLERS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE / 2)
        kinds["hang"] += thread.is_alive()
    return +kinds


def _outcomes(caller: Any, peer: str, draw: random.Random) -> Iterator[str]:
    kept: deque[Any] = deque(maxlen=20)
    while True:
        try:
            caller(peer, draw, kept)
        except rpc.PeerLost as error:
            yield "PeerLost" if error.worker == peer else f"PeerLost {error.worker}: {error}"
            break
        except BaseException as error:
            yield f"{type(error).__name__}: {error}"
            break
        yield "value"
    for tensor, expected in kept:  # what has arrived outlives the peer, unchanged
        if expected is not None and not bool((tensor == expected).all()):
            yield "damaged"
