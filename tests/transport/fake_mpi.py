"""A stand-in for torch's process group over mpi, in one process: builds with mpi are rare.

As in torch, an operation that is destroyed before it is over is fatal, and nothing can be taken
back. Its `wait` is not to be used: it would hold up all others.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from farcall.runtime.process_groups import mpi
from farcall.runtime.process_groups.mpi import MpiGroup


class Work:
    """One operation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def __del__(self) -> None:
        if not self.is_over:
            raise RuntimeError("destroyed before it was over: torch would end the process")


class Job:
    """A job of mpirun: all ranks, and their messages by communicator, ranks and tag."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.sent: dict[tuple[Any, ...], deque[Work]] = defaultdict(deque)
        self.awaited: dict[tuple[Any, ...], deque[Work]] = defaultdict(deque)


class ProcessGroupMPI:
    """One rank of a communicator."""

    def __init__(self, job: Job, rank: int, communicator: tuple[int, ...]) -> None:
        self._job = job
        self._rank = rank
        self._communicator = communicator

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._communicator) or self._job.size

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        return self._begin(tensors, (self._communicator, self._rank, to, tag), is_sent=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return self._begin(tensors, (self._communicator, source, self._rank, tag), is_sent=False)

    def _begin(self, tensors: list[torch.Tensor], key: tuple[Any, ...], *, is_sent: bool) -> Work:
        work = Work(tensors[0])
        job = self._job
        with job.lock:
            (job.sent if is_sent else job.awaited)[key].append(work)
            while job.sent[key] and job.awaited[key]:
                sent, awaited = job.sent[key].popleft(), job.awaited[key].popleft()
                assert len(sent.tensor) <= len(awaited.tensor), "mpi: message truncated"
                awaited.tensor[: len(sent.tensor)] = sent.tensor
                sent.is_over = awaited.is_over = True
        return work


class Process:
    """In the place of torch's class, for the process of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank

    def create(self, ranks: list[int]) -> ProcessGroupMPI:
        return ProcessGroupMPI(self._job, self._rank, tuple(ranks))


def groups(size: int, monkeypatch: pytest.MonkeyPatch) -> list[MpiGroup]:
    """Return the new groups, one for every rank."""
    job = Job(size)
    made = []
    for rank in range(size):
        monkeypatch.setattr(mpi, "_Mpi", Process(job, rank))
        made.append(MpiGroup(rank, size))
    return made
