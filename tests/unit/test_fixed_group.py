"""The questions of a worker of a fixed group to the store while it waits for the others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from patience import PATIENCE
from torch.distributed import HashStore, PrefixStore

from farcall.ids import Worker, new_incarnation
from farcall.runtime.membership.fixed_group import FixedGroup
from farcall.runtime.membership.records import CONFIRMATION, RECORD, Confirmation, Record
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import SecretSigner

SIGNER = SecretSigner(b"what only the members know")
PREFIX = "farcall/0"


class Pauses(threading.Event):
    """Stands for the event that ends a worker's wait: notes for how long, and takes no time."""

    def __init__(self, step: Callable[[int], None]) -> None:
        super().__init__()
        self.lengths: list[float] = []
        self._step = step

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.lengths.append(timeout)
        self._step(len(self.lengths))
        return False


def worker(rank: int) -> Worker:
    return Worker(f"w{rank}", rank, new_incarnation(), (f"inproc://w{rank}",), "box/0", 7)


def board() -> SignedStore:
    return SignedStore(PrefixStore(PREFIX, HashStore()), PREFIX, SIGNER)


@pytest.mark.parametrize(("size", "first", "longest"), [(2, 0.0003, 0.05), (200, 0.02, 0.2)])
def test_worker_that_has_confirmed_asks_often_again(
    size: int, first: float, longest: float
) -> None:
    workers = [worker(rank) for rank in range(size)]
    store = board()
    for one in workers[:-1]:
        store.put(f"rank/{one.id}", Record(one))
    alone, together = 40, 10  # pauses until the last one comes, and until it has confirmed

    def step(pauses: int) -> None:
        if pauses == alone:
            store.put(f"rank/{size - 1}", Record(workers[-1]))
        if pauses == alone + together:
            confirmed = store.read("confirmed/0", CONFIRMATION).value
            for one in workers[1:]:
                store.put(f"confirmed/{one.id}", Confirmation(one.name, confirmed.members))

    pauses = Pauses(step)
    group = FixedGroup(store, workers[0], size)
    assert group.wait(PATIENCE, math.inf, pauses) == workers
    assert store.read(f"rank/{size - 1}", RECORD).value == Record(workers[-1])
    before, after = pauses.lengths[:alone], pauses.lengths[alone:]
    assert (before[0], before[-1]) == (first, longest)
    assert (after[0], len(after)) == (first, together)
    for part in (before, after):
        assert all(one <= other <= 1.3 * one for one, other in pairwise(part))
