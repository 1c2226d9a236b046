"""Tensors on CUDA devices between processes: they go by nccl.

With one device for all of them each process is a host of its own to nccl.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed
from crew import PATIENCE, Crew, Member, call, leave_all

from farcall import rpc
from farcall.runtime.current import current_agent
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_nccl_available() or not torch.cuda.is_available(),
    reason="needs a CUDA device and a torch with nccl",
)

_never = threading.Event()


def device_of(rank: int) -> int:
    return rank % torch.cuda.device_count()


def join_with_devices(rank: int, size: int, init_method: str) -> bool:
    """Join with the device of the rank, or with the only one; return whether there are channels."""
    if torch.cuda.device_count() < size:
        os.environ["NCCL_HOSTID"] = f"w{rank}"
    options = rpc.ProcessGroupRpcBackendOptions(
        init_method=init_method,
        rpc_timeout=PATIENCE,
        device_maps={f"w{n}": {device_of(rank): device_of(n)} for n in range(size) if n != rank},
    )
    rpc.init_rpc(f"w{rank}", rpc.BackendType.PROCESS_GROUP, rank, size, options)
    endpoint = current_agent().endpoint
    return isinstance(endpoint, ProcessGroupEndpoint) and endpoint.has_device_channels


def group_of(crew: Crew, count: int) -> list[Member]:
    members = crew.members(count)
    for rank, member in enumerate(members):
        member.start(join_with_devices, rank, count, crew.init_method)
    assert all(member.result() for member in members)
    return members


def doubled_by(to: str, size: int, times: int) -> bool:
    """Have tensors doubled by a worker; each is changed on a stream of its own just before."""
    mine = torch.device("cuda", device_of(rpc.get_worker_info().id))
    with torch.cuda.device(mine), torch.cuda.stream(torch.cuda.Stream(mine)):
        for number in range(times):
            sent = torch.zeros(size, device=mine)
            sent += number
            futures = [rpc.rpc_async(to, torch.mul, args=(sent, 2)) for _ in range(3)]
            for future in futures:
                got = future.wait()
                assert got.device == mine
                assert torch.equal(got.cpu(), torch.full((size,), 2.0 * number))
    return True


def waits_for_ever(tensor: torch.Tensor) -> None:
    assert tensor.is_cuda
    _never.wait()


def sends_to_who_dies(to: str) -> None:
    rpc.rpc_sync(to, waits_for_ever, args=(torch.ones(10_000_000, device="cuda:0"),), timeout=0)


def dies(tensor: torch.Tensor) -> None:
    os._exit(1)


def kills(to: str) -> None:
    rpc.rpc_sync(to, dies, args=(torch.ones(1000, device="cuda:0"),), timeout=0)


@pytest.mark.parametrize("size", [1, 1000, 30_000_000])
def test_both_send_at_once_and_get_the_right_tensors(crew: Crew, size: int) -> None:
    first, second = group_of(crew, 2)
    first.start(doubled_by, "w1", size, 20)
    second.start(doubled_by, "w0", size, 20)
    assert first.result()
    assert second.result()
    leave_all(first, second)


def test_worker_that_dies_with_tensors_under_way_is_lost(crew: Crew) -> None:
    first, _ = group_of(crew, 2)
    first.start(kills, "w1")
    assert type(first.fails()) is rpc.PeerLost
    first.start(sends_to_who_dies, "w1")
    assert type(first.fails()) is rpc.PeerLost
    assert first.run(call, "w0", torch.neg, torch.ones(3)).tolist() == [-1.0] * 3
