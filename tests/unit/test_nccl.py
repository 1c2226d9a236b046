"""When workers of a process group use nccl: all have it, and a device that nobody else has."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed import HashStore

from farcall.runtime import nccl
from farcall.runtime.nccl import Candidate, NcclLanes

CUDA = [torch.device("cuda", 0)]


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, str]:
    """By device: as if this torch had nccl, and this machine these devices."""
    known: dict[torch.device, str] = {}
    monkeypatch.setattr(nccl, "_Nccl", object())
    monkeypatch.setattr(nccl, "_identity", lambda device: known.get(device, ""))
    return known


def lanes_of(*devices: list[torch.device]) -> list[NcclLanes | None]:
    store = HashStore()
    candidates = [Candidate(store, rank, own) for rank, own in enumerate(devices)]
    return [candidate.lanes(len(devices)) for candidate in candidates]


def test_workers_with_devices_of_their_own_have_lanes(
    identities: dict[torch.device, str],
) -> None:
    devices = [torch.device("cuda", index) for index in range(3)]
    identities.update((device, f"GPU-{device.index}") for device in devices)
    assert all(isinstance(lanes, NcclLanes) for lanes in lanes_of(*([one] for one in devices)))


def test_workers_that_share_a_device_have_none(
    identities: dict[torch.device, str], caplog: pytest.LogCaptureFixture
) -> None:
    identities[CUDA[0]] = "GPU-0"
    with caplog.at_level(logging.INFO, "farcall"):
        assert lanes_of(CUDA, CUDA) == [None, None]
    assert "share a CUDA device" in caplog.text


@pytest.mark.parametrize("other", [[], [torch.device("cuda", 7)]])
def test_one_worker_without_a_device_is_enough_to_have_none(
    identities: dict[torch.device, str], other: list[torch.device]
) -> None:
    identities[CUDA[0]] = "GPU-0"
    assert lanes_of(CUDA, other) == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is to be missing")
def test_machine_without_cuda_has_none() -> None:
    assert lanes_of(CUDA, CUDA) == [None, None]
