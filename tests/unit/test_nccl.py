"""When workers of a process group use nccl: all have it, and a device that no other worker has."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from farcall.runtime.process_groups import nccl
from farcall.runtime.process_groups.nccl import NcclCandidate, NcclChannels


class Machine:
    """As if this torch had nccl, and this machine CUDA devices: their identities, by index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[str] = []
        monkeypatch.setattr(nccl, "_Nccl", object())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.devices))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: SimpleNamespace(uuid=self.devices[index]),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def channels_of(*devices: list[torch.device]) -> list[NcclChannels | None]:
    store = HashStore()
    candidates = [NcclCandidate(store, rank, own) for rank, own in enumerate(devices)]
    return [candidate.channels(len(devices)) for candidate in candidates]


def test_workers_with_devices_of_their_own_have_device_channels(machine: Machine) -> None:
    machine.devices = ["GPU-0", "GPU-1", "GPU-2"]
    devices = [[torch.device("cuda")], [torch.device("cuda", 1)], [torch.device("cuda", 2)]]
    assert all(isinstance(channels, NcclChannels) for channels in channels_of(*devices))


def test_workers_that_share_a_device_have_none(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.devices = ["GPU-0"]
    with caplog.at_level(logging.INFO, "farcall"):
        assert channels_of([torch.device("cuda")], [torch.device("cuda", 0)]) == [None, None]
    assert "share a CUDA device" in caplog.text


def test_workers_of_hosts_that_are_different_to_nccl_may_share_a_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.devices = ["GPU-0"]
    store = HashStore()
    candidates = []
    for rank in range(2):
        monkeypatch.setenv("NCCL_HOSTID", f"host{rank}")
        candidates.append(NcclCandidate(store, rank, [torch.device("cuda", 0)]))
    assert all(candidate.channels(2) is not None for candidate in candidates)


@pytest.mark.parametrize("other", [[], [torch.device("cuda", 7)]])
def test_one_worker_without_a_device_is_enough_to_have_none(
    machine: Machine, other: list[torch.device]
) -> None:
    machine.devices = ["GPU-0"]
    assert channels_of([torch.device("cuda", 0)], other) == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_machine_without_cuda_has_none() -> None:
    devices = [torch.device("cuda", 0)]
    assert channels_of(devices, devices) == [None, None]
