"""Handlers that wait the way torch offers, where farcall can't see the wait begin."""

from __future__ import annotations

import operator

import pytest
import torch
from clusters import patient_cluster
from patience import PATIENCE

from farcall import rpc
from farcall.testing.cluster import TRANSPORTS, Transport, acting_as


def gather_back(depth: int, to: str, back: str) -> int:
    """Waits with `torch.futures.wait_all` for a call that calls back, `depth` levels deep."""
    if depth == 0:
        return 0
    calls = [
        rpc.rpc_async(to, gather_back, args=(depth - 1, back, to)),
        rpc.rpc_async(to, operator.add, args=(0, 1)),
    ]
    return sum(torch.futures.wait_all(calls))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mutual_calls_under_wait_all_do_not_starve_a_single_thread(transport: Transport) -> None:
    with patient_cluster(2, transport=transport, num_worker_threads=1) as (w0, _), acting_as(w0):
        assert rpc.rpc_sync("w1", gather_back, args=(6, "w0", "w1"), timeout=PATIENCE) == 6
