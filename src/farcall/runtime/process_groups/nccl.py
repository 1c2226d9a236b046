"""DeviceChannels over nccl: buffers on CUDA devices travel from one to the other, past the CPU.

Each direction of a pair of ranks has a communicator of its own, which both make when it is first
used. A communicator does one thing after the other: with one for both directions, two ranks that
send at once would each wait for the other to receive. nccl notices no deaths, and its waits have no
end: a rank that hears of a lost one abandons its channels.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.errors import LinkError
from farcall.log import get_logger
from farcall.runtime.process_groups.gloo import NO_LIMIT
from farcall.torch_internals import assign
from farcall.wire.messages import OnDevice

logger = get_logger("farcall")

# None if torch was built without it. Any, since torch's stubs say nothing of what it can do.
_Nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
# By default torch ends the process when nccl reports an error. It reads this in the constructor.
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LEAVE_IT_TO_US = "0"
_HOST = "NCCL_HOSTID"
_constructing = threading.Lock()


class _NcclOperation:
    """See `group.Operation`."""

    def __init__(self, channel: _NcclChannel, done: torch.cuda.Event, memory: torch.Tensor) -> None:
        self._channel = channel
        self._done = done
        self._memory = memory  # the allocator doesn't know that it is in use

    def wait(self) -> None:
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise _link_error(error) from error
        self._channel.check()


class _NcclChannel:
    """One direction of a pair. Used by one thread at a time, but for `abandon`.

    Args:
        store: where the two meet; used by this channel alone.
        rank: in the pair: 0 sends, 1 receives.
        device: the memory that nccl sees is there.
    """

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        options = _Nccl.Options()
        assign(options, "timeout_of_options", NO_LIMIT)
        with _errors_left_to_us():
            self._nccl: Any = _Nccl(store, rank, 2, options)
        self._device = device
        self._cuda_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_abandoned = False

    def send(self, buffer: OnDevice) -> _NcclOperation:
        memory: Any = buffer.memory
        ready: Any = buffer.ready
        with self._on_cuda_stream():
            if ready is not None:
                # Copies between devices run after what both have to do on their current streams.
                torch.cuda.current_stream(memory.device).wait_event(ready)
                self._cuda_stream.wait_event(ready)
            moved = memory.to(self._device)
            return self._started(self._nccl.send([moved], 1, 0), moved)

    def receive(self, size: int) -> tuple[OnDevice, _NcclOperation]:
        with self._on_cuda_stream():
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            operation = self._started(self._nccl.recv([memory], 0, 0), memory)
        return OnDevice(memory, size), operation

    @contextlib.contextmanager
    def _on_cuda_stream(self) -> Iterator[None]:
        self.check()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._cuda_stream):
                yield
        except RuntimeError as error:
            raise _link_error(error) from error

    def _started(self, work: Any, memory: torch.Tensor) -> _NcclOperation:
        work.wait()  # it is our CUDA stream that waits
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._cuda_stream)
        return _NcclOperation(self, done, memory)

    def check(self) -> None:
        """Raises LinkError: it was abandoned."""
        if self._is_abandoned:
            raise LinkError(
                "the process group's nccl channel was abandoned: one of its ranks is lost"
            )

    def abandon(self) -> None:
        """End the operations under way."""
        self._is_abandoned = True
        with contextlib.suppress(RuntimeError):
            self._nccl.abort()


class NcclChannels:
    """See `group.DeviceChannels`.

    Args:
        store: where the ranks meet; used by these channels alone.
        rank: of this process.
        device: a CUDA device that no other rank uses. Tensors on another device of this
            process are copied.
    """

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._lock = threading.Lock()  # guards what follows
        self._channels: dict[tuple[int, int], _NcclChannel] = {}  # by sender and receiver
        self._abandoned: set[int] = set()
        self._is_closed = False

    def send(self, to: int, buffer: OnDevice) -> _NcclOperation:
        return self._channel(self._rank, to).send(buffer)

    def receive(self, source: int, size: int) -> tuple[OnDevice, _NcclOperation]:
        return self._channel(source, self._rank).receive(size)

    def _channel(self, sender: int, receiver: int) -> _NcclChannel:
        with self._lock:
            if self._is_closed or {sender, receiver} & self._abandoned:
                raise LinkError("the process group's nccl channels are closed")
            channel = self._channels.get((sender, receiver))
            if channel is None:
                store = PrefixStore(f"{sender} to {receiver}", self._store)
                rank = 0 if sender == self._rank else 1
                try:
                    channel = _NcclChannel(store, rank, self._device)
                except RuntimeError as error:
                    raise _link_error(error) from error
                self._channels[sender, receiver] = channel
            return channel

    def abandon(self, rank: int) -> None:
        with self._lock:
            self._abandoned.add(rank)
            channels = [channel for pair, channel in self._channels.items() if rank in pair]
        for channel in channels:
            channel.abandon()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.abandon()


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    with _constructing:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _LEAVE_IT_TO_US
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def _link_error(error: RuntimeError) -> LinkError:
    return LinkError(f"nccl failed: {str(error).strip()[:300]}")


class NcclCandidate:
    """Finds out, with the other ranks, whether there can be channels: all have nccl and a device.

    Args:
        store: where the ranks meet; used for this alone.
        rank: of this process.
        devices: what this worker's options name; CUDA is not touched if there are none.
    """

    def __init__(self, store: Store, rank: int, devices: Sequence[torch.device]) -> None:
        self._store = store
        self._rank = rank
        self._device = next(iter(devices), None) if _Nccl is not None else None
        store.set(f"device/{rank}", _identity(self._device))

    def channels(self, size: int) -> NcclChannels | None:
        """Return the channels, or None if there can be none. To be called when all ranks are there.

        Args:
            size: how many ranks there are.
        """
        identities = [
            self._store.get(f"device/{rank}").decode(errors="replace") for rank in range(size)
        ]
        if self._device is None or not all(identities):
            return None
        if len(set(identities)) < size:
            logger.info("workers share a CUDA device, so nccl is not used: tensors go by the CPU")
            return None
        return NcclChannels(self._store, self._rank, self._device)


def _identity(device: torch.device | None) -> str:
    """Return an identity that no other CUDA device of any host has; "" if there is none.

    Hosts are told apart as by nccl: workers with values of their own of NCCL_HOSTID may share a
    device, and talk by sockets then.
    """
    if device is None or not torch.cuda.is_available():
        return ""
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        return ""
    return f"{os.environ.get(_HOST, '')} {torch.cuda.get_device_properties(index).uuid}"
