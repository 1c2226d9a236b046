"""The meeting of the ranks of a process group, whatever carries their messages."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from farcall.runtime.membership.stores import bounded
from farcall.runtime.process_groups.gloo import GlooGroup
from farcall.runtime.process_groups.mpi import MpiGroup
from farcall.transport.process_group.group import RankGroup

BACKENDS = ("gloo", "mpi")
_STEP_SECONDS = 1.0  # one wait at the store


def open_group(
    backend: str, store: Store, rank: int, size: int, host: str, timeout: float, name: str
) -> RankGroup:
    """Wait for all ranks and connect them. Blocks the calling thread.

    Args:
        backend: one of `BACKENDS`.
        store: where the ranks meet; used by this group alone.
        rank: of this process, 0 to size - 1.
        size: how many ranks there are.
        host: to listen on; gloo only.
        timeout: seconds to wait for the others; 0 for no limit.
        name: of this worker, for messages.

    Raises:
        RendezvousTimeout: not all came in time; says which ranks are missing.
        DuplicateWorker: another worker has the rank.
        RendezvousError: the ranks can't be connected, or torch was built without the backend.
    """
    deadline = time.monotonic() + timeout if timeout else float("inf")
    holder = store.compare_set(f"here/{rank}", "", name).decode(errors="replace")
    if holder != name:
        raise DuplicateWorker(
            f"rank {rank} is not unique: {holder!r} has it, {name!r} wants it too"
        )
    _wait_for_all(store, rank, size, deadline, timeout, name)
    where = f"at the addresses of `listen`, here {host!r}" if backend == "gloo" else "by mpi"
    late = RendezvousTimeout(
        f"init_rpc of {name!r}: all {size} ranks are there, but {backend} could not connect them "
        f"in {timeout:.1f} s: can they reach each other {where}?"
    )
    left = max(1.0, deadline - time.monotonic())

    def connect() -> RankGroup:
        if backend == "mpi":
            return MpiGroup(rank, size)
        return GlooGroup(PrefixStore("gloo", store), rank, size, host)

    try:
        return bounded(connect, min(left, threading.TIMEOUT_MAX), late)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        reason = str(error).splitlines()[0]
        raise RendezvousError(f"init_rpc of {name!r}: {backend} at {host!r}: {reason}") from error


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
