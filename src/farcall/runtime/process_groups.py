"""Process groups of torch.distributed, as the transport `process_group` wants them.

A group is made here, for RPC alone: `init_process_group`'s state is neither used nor touched, so a
program may have its own groups beside it, or none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.errors import DuplicateWorker, LinkError, RendezvousError, RendezvousTimeout
from farcall.runtime.stores import bounded
from farcall.wire.messages import Buffer

# None: torch was built without it. Any: torch's stubs say nothing of what it can do.
_Gloo: Any = getattr(torch.distributed, "ProcessGroupGloo", None)

# A wait of gloo that runs out of time closes every connection of its context.
NO_LIMIT = timedelta(days=3650)
_CLOSING_TAG = 0
_STEP_SECONDS = 1.0  # one wait at the store


class _Operation:
    """See `group.Operation`."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor  # gloo keeps no reference

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(error) from error


class GlooGroup:
    """See `group.Group`. Blocks until all ranks are there; so each needs its own thread or process.

    Args:
        store: where the ranks meet; used by this group alone.
        rank: of this process, 0 to size - 1.
        size: how many ranks there are.
        host: to listen on: a name or address of this machine that the others can reach.

    Raises:
        RuntimeError: gloo can't listen, or can't reach another rank.
    """

    scheme = "gloo"

    def __init__(self, store: Store, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        options = _Gloo._Options()
        options._timeout = NO_LIMIT
        options._threads = 1  # for collectives; there are none
        options._devices = [_Gloo.create_device(hostname=host, lazy_init=False)]
        self._gloo: Any = _Gloo(store, rank, size, options)

    def send(self, to: int, tag: int, memory: Buffer) -> _Operation:
        tensor = _tensor_over(memory)
        try:
            return _Operation(self._gloo.send([tensor], to, tag), tensor)
        except RuntimeError as error:
            raise _lost(error) from error

    def receive(self, source: int, tag: int, memory: Buffer) -> _Operation:
        tensor = _tensor_over(memory)
        try:
            return _Operation(self._gloo.recv([tensor], source, tag), tensor)
        except RuntimeError as error:
            raise _lost(error) from error

    def close(self) -> None:
        # What gloo has for this, `abort`, ends no wait. A wait that takes too long ends all, if
        # that rank is still there; if not, it fails at once.
        for other in range(self.size):
            if other != self.rank:
                with contextlib.suppress(RuntimeError):
                    work = self._gloo.recv([torch.empty(1)], other, _CLOSING_TAG)
                    work.wait(timedelta(milliseconds=1))

    def free(self) -> None:
        self._gloo = _Freed()


class _Freed:
    """In place of what was freed."""

    def send(self, *_: object) -> None:
        raise RuntimeError("this worker has shut down")

    recv = send


def _tensor_over(memory: Buffer) -> torch.Tensor:
    view = memoryview(memory)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _lost(error: RuntimeError) -> LinkError:
    """Without the place in gloo's source and what it advises."""
    text = str(error).rpartition("] ")[2] if "] " in str(error) else str(error)
    return LinkError(f"the process group's connection is closed: {text.strip()[:200]}")


def open_gloo(
    store: Store, rank: int, size: int, host: str, timeout: float, name: str
) -> GlooGroup:
    """Wait for all ranks and connect them. Blocks the calling thread.

    Args:
        store: where the ranks meet; used by this group alone.
        rank: of this process, 0 to size - 1.
        size: how many ranks there are.
        host: to listen on.
        timeout: seconds to wait for the others; 0 for no limit.
        name: of this worker, for messages.

    Raises:
        RendezvousTimeout: not all came in time; says which ranks are missing.
        DuplicateWorker: another worker has the rank.
        RendezvousError: the ranks can't be connected, or there is no gloo.
    """
    if _Gloo is None:
        raise RendezvousError("this build of torch has no gloo, which PROCESS_GROUP needs")
    deadline = time.monotonic() + timeout if timeout else float("inf")
    holder = store.compare_set(f"here/{rank}", "", name).decode()
    if holder != name:
        raise DuplicateWorker(
            f"rank {rank} is not unique: {holder!r} has it, {name!r} wants it too"
        )
    _wait_for_all(store, rank, size, deadline, timeout, name)
    late = RendezvousTimeout(
        f"init_rpc of {name!r}: all {size} ranks are there, but gloo could not connect them in "
        f"{timeout:.1f} s: can they reach each other at the addresses of `listen`, here {host!r}?"
    )
    left = max(1.0, deadline - time.monotonic())
    try:
        return bounded(
            lambda: GlooGroup(PrefixStore("gloo", store), rank, size, host),
            min(left, threading.TIMEOUT_MAX),
            late,
        )
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        reason = str(error).splitlines()[0]
        raise RendezvousError(f"init_rpc of {name!r}: gloo at {host!r}: {reason}") from error


def _wait_for_all(
    store: Store, rank: int, size: int, deadline: float, timeout: float, name: str
) -> None:
    for other in range(size):
        while not store.check([f"here/{other}"]):
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [n for n in range(size) if not store.check([f"here/{n}"])]
                raise RendezvousTimeout(
                    f"init_rpc of {name!r} (rank {rank}) waited {timeout:.1f} s: missing: "
                    f"{', '.join(f'rank {n}' for n in missing)} of {size}"
                )
            with contextlib.suppress(RuntimeError):  # "wait timeout"
                store.wait(
                    [f"here/{other}"], timedelta(seconds=max(min(left, _STEP_SECONDS), 0.001))
                )
