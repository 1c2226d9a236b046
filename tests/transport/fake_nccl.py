"""A stand-in for nccl and CUDA's streams in torch, in one process and in the CPU's memory.

As on GPUs, work is given to streams and done later, each after what its stream had to do before;
memory that is dropped meanwhile has another owner. A communicator does one thing after the other,
and one that the peer does not join in never ends, but by `abort`, which leaves memory as it was and
ends nothing of the peer's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stations import PATIENCE
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from farcall.runtime.process_groups import nccl
from farcall.runtime.process_groups.nccl import NcclChannels

CPU = torch.device("cpu")


class Work:
    """Something for a stream to do, once what it comes after is over."""

    def __init__(self, machine: Machine, memory: torch.Tensor | None = None) -> None:
        self._machine = machine
        self._memory = memory if memory is None else weakref.ref(memory)
        self._after = machine.current_stream().unfinished()
        self.is_over = False

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None
        tensor = self._memory()
        assert tensor is not None, "memory was freed that nccl still uses"
        return tensor

    def can_begin(self) -> bool:
        return all(work.is_over for work in self._after)

    def wait(self) -> None:
        """Make later work of the current stream wait for this, as torch's does."""
        self._machine.current_stream().add([self])


class Stream:
    """See torch.cuda.Stream."""

    def __init__(self, device: torch.device) -> None:
        self._works: list[Work] = []

    def add(self, works: list[Work]) -> None:
        self._works = [*self.unfinished(), *works]

    def unfinished(self) -> list[Work]:
        return [work for work in self._works if not work.is_over]

    def wait_event(self, event: Event) -> None:
        self.add(event.works)


class Event:
    """See torch.cuda.Event. Waits give up after a while, so that a test that fails ends."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.works: list[Work] = []

    def record(self, stream: Stream) -> None:
        self.works = stream.unfinished()

    def synchronize(self) -> None:
        changed = self._machine.changed
        with changed:
            assert changed.wait_for(lambda: all(work.is_over for work in self.works), PATIENCE)


class Communicator:
    """Between two ranks: what each has begun."""

    def __init__(self) -> None:
        self.joined = [False, False]
        self.begun: tuple[deque[tuple[str, Work]], ...] = (deque(), deque())

    def progress(self) -> None:
        while all(self.begun) and all(queue[0][1].can_begin() for queue in self.begun):
            (kind, one), (other_kind, other) = (queue[0] for queue in self.begun)
            if kind == other_kind:
                return  # both send, or both receive: forever
            sent, received = (one, other) if kind == "send" else (other, one)
            received.memory.copy_(sent.memory)
            for queue in self.begun:
                queue.popleft()[1].is_over = True


class Machine:
    """Makes what stands for torch's classes. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error_handling: list[str | None] = []  # as the environment said to each process group
        self.failure = ""  # of whatever nccl is asked next
        self._communicators: dict[str, Communicator] = defaultdict(Communicator)
        self._local = threading.local()

    def current_stream(self, device: torch.device = CPU) -> Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = Stream(device)
        stream: Stream = self._local.stream
        return stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def fail_if_told(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def progress(self) -> None:
        """`changed` held."""
        for communicator in self._communicators.values():
            communicator.progress()
        self.changed.notify_all()

    def join(self, name: str, rank: int) -> Communicator:
        """Join and wait for the other rank, as nccl does."""
        with self.changed:
            communicator = self._communicators[name]
            communicator.joined[rank] = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: all(communicator.joined), PATIENCE)
            return communicator

    def compute(self, run: Callable[[], object]) -> Callable[[], None]:
        """Give the current stream something to do; it is done when the result is called."""
        work = Work(self)
        work.wait()

        def finish() -> None:
            with self.changed:
                run()
                work.is_over = True
                self.progress()

        return finish

    def process_group(self) -> type:
        """Return a stand-in for torch's class."""
        machine = self

        class ProcessGroupNCCL:
            class Options:
                _timeout: object

            def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
                machine.fail_if_told()
                assert size == 2
                assert options._timeout
                machine.error_handling.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
                self._store = store
                self._rank = rank
                self._communicator: Communicator | None = None
                self._is_aborted = False

            def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
                return self._begin("send", tensors, to)

            def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
                return self._begin("receive", tensors, source)

            def _begin(self, kind: str, tensors: list[torch.Tensor], other: int) -> Work:
                assert other == 1 - self._rank
                if self._communicator is None:
                    if self._rank == 0:
                        self._store.set("id", str(id(self)))
                    self._communicator = machine.join(self._store.get("id").decode(), self._rank)
                machine.fail_if_told()
                with machine.changed:
                    if self._is_aborted:
                        raise RuntimeError("NCCL communicator was aborted")
                    work = Work(machine, tensors[0])
                    self._communicator.begun[self._rank].append((kind, work))
                    machine.progress()
                return work

            def abort(self) -> None:
                with machine.changed:
                    self._is_aborted = True
                    if self._communicator is not None:
                        begun = self._communicator.begun[self._rank]
                        while begun:
                            begun.popleft()[1].is_over = True
                    machine.progress()

        return ProcessGroupNCCL


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have `farcall.runtime.process_groups.nccl` use it; its device is the CPU."""
    machine = Machine()
    monkeypatch.setattr(nccl, "_Nccl", machine.process_group())
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "Event", lambda blocking: Event(machine))
    monkeypatch.setattr(cuda, "current_stream", machine.current_stream)
    monkeypatch.setattr(cuda, "stream", machine.stream)
    monkeypatch.setattr(cuda, "device", contextlib.nullcontext)
    return machine


def channels(size: int) -> list[NcclChannels]:
    """Return the channels of every rank."""
    store = HashStore()
    return [NcclChannels(store, rank, CPU) for rank in range(size)]
