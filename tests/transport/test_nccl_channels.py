"""The channels of nccl over a stand-in of torch's part: when bytes are read, and how waits end."""

from __future__ import annotations

import os
from typing import Any

import fake_nccl
import pytest
import torch
from fake_nccl import Machine
from stations import Threads

from farcall.errors import LinkError
from farcall.runtime.process_groups.nccl import NcclChannels
from farcall.transport.process_group.group import Operation
from farcall.wire.messages import OnDevice

VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_nccl.install(monkeypatch)


def one_byte(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.uint8)


class Transfer:
    """Bytes from rank 0 to another, each in a buffer of its own: begun by both, not awaited."""

    def __init__(
        self, channels: list[NcclChannels], threads: Threads, buffers: list[OnDevice], to: int = 1
    ) -> None:
        self.sends: list[Operation] = []
        self.receives: list[Operation] = []
        self.received: list[Any] = []
        threads.start(self._receive, channels[to], len(buffers))
        threads.start(self._send, channels[0], buffers, to)
        threads.join()

    def _send(self, channels: NcclChannels, buffers: list[OnDevice], to: int) -> None:
        while buffers:  # so that no other variable keeps them
            self.sends.append(channels.send(to, buffers.pop(0)))

    def _receive(self, channels: NcclChannels, count: int) -> None:
        for _ in range(count):
            buffer, operation = channels.receive(0, 1)
            self.received.append(buffer.memory)
            self.receives.append(operation)

    def end(self) -> list[int]:
        """Return the buffers that arrived."""
        for operation in (*self.sends, *self.receives):
            operation.wait()
        return [memory.item() for memory in self.received]


def test_buffers_arrive_in_order_and_are_kept_until_then(
    machine: Machine, threads: Threads
) -> None:
    buffers = [OnDevice(one_byte(number), 1) for number in range(10)]
    assert Transfer(fake_nccl.channels(2), threads, buffers).end() == list(range(10))


def test_a_tensor_that_is_still_computed_is_read_when_it_is_ready(
    machine: Machine, threads: Threads
) -> None:
    tensor = one_byte(0)
    finish = machine.compute(lambda: tensor.fill_(7))
    ready = fake_nccl.Event(machine)
    ready.record(machine.current_stream())
    transfer = Transfer(fake_nccl.channels(2), threads, [OnDevice(tensor, 1, ready)])
    transfer.received[0].fill_(99)
    finish()
    assert transfer.end() == [7]


@pytest.mark.parametrize("waits", ["sender", "receiver"])
@pytest.mark.parametrize("closes", [False, True])
def test_waits_end_when_channels_are_abandoned(
    machine: Machine, threads: Threads, waits: str, closes: bool
) -> None:
    near, far = channels = fake_nccl.channels(2)
    Transfer(channels, threads, [OnDevice(one_byte(1), 1)]).end()
    if waits == "sender":
        waiting, other = near, 1
        operation: Operation = near.send(1, OnDevice(one_byte(2), 1))
    else:
        waiting, other = far, 0
        _, operation = far.receive(0, 1)

    def wait() -> None:
        with pytest.raises(LinkError, match="abandoned"):
            operation.wait()

    threads.start(wait)
    if closes:
        waiting.close()
    else:
        waiting.abandon(other)
    threads.join()
    with pytest.raises(LinkError, match="closed"):
        waiting.send(other, OnDevice(one_byte(3), 1))
    with pytest.raises(LinkError, match="closed"):
        waiting.receive(other, 1)


def test_channels_to_other_ranks_are_not_abandoned(machine: Machine, threads: Threads) -> None:
    channels = fake_nccl.channels(3)
    for to in (1, 2):
        assert Transfer(channels, threads, [OnDevice(one_byte(to), 1)], to).end() == [to]
    channels[0].abandon(1)
    assert Transfer(channels, threads, [OnDevice(one_byte(5), 1)], 2).end() == [5]


def test_both_ranks_may_send_at_once(machine: Machine, threads: Threads) -> None:
    channels = fake_nccl.channels(2)

    def send(rank: int) -> None:
        channels[rank].send(1 - rank, OnDevice(one_byte(rank), 1)).wait()

    def receive(rank: int) -> None:
        buffer: Any
        buffer, received = channels[rank].receive(1 - rank, 1)
        received.wait()
        assert buffer.memory.item() == 1 - rank

    for rank in range(2):
        threads.start(send, rank)
        threads.start(receive, rank)
    threads.join()


def test_errors_of_nccl_are_those_of_a_link(machine: Machine, threads: Threads) -> None:
    channels = fake_nccl.channels(2)
    machine.failure = "NCCL Error 2: unhandled system error"
    with pytest.raises(LinkError, match="unhandled system error"):
        channels[0].send(1, OnDevice(one_byte(1), 1))
    machine.failure = ""
    assert Transfer(channels, threads, [OnDevice(one_byte(3), 1)]).end() == [3]
    machine.failure = "NCCL Error 5: invalid usage"
    with pytest.raises(LinkError, match="invalid usage"):
        channels[0].send(1, OnDevice(one_byte(1), 1))


@pytest.mark.parametrize("before", [None, "1"])
def test_torch_leaves_errors_to_us_and_only_here(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, threads: Threads, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, before)
    Transfer(fake_nccl.channels(2), threads, [OnDevice(one_byte(1), 1)]).end()
    assert machine.error_handling == ["0", "0"]
    assert os.environ.get(VARIABLE) == before
