"""A process group over mpi, for builds of torch that have it.

torch's own wait holds a lock that every other use of mpi needs, so operations are never waited for:
a thread asks them whether they are over. mpi notices no ends: a rank that leaves has to say so, and
one that dies takes the whole job with it, which is what its launcher does by default.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed

from farcall.errors import LinkError, RendezvousError
from farcall.runtime.process_groups.gloo import tensor_over
from farcall.threads import FarcallThread
from farcall.wire.messages import Buffer

# None if torch was built without it. Any, since torch's stubs say nothing of what it can do.
_Mpi: Any = getattr(torch.distributed, "ProcessGroupMPI", None)

CHUNK = 1 << 30  # bytes of a message at most: mpi counts them in an int
_SHORT_PAUSE, _LONG_PAUSE = 20e-6, 1e-3  # seconds between two rounds of questions


class _MpiOperation:
    """See `group.Operation`."""

    def __init__(self, works: list[Any], tensors: list[Any]) -> None:
        self._works = works
        self._tensors = tensors  # mpi keeps no reference
        self._over = threading.Event()
        self._failure: str | None = None

    def is_over(self) -> bool:
        """Asked by the poller alone."""
        try:
            return all(work.is_completed() for work in self._works)
        except RuntimeError as error:
            self._failure = f"mpi failed: {error}"
            return True

    def end(self, failure: str | None) -> None:
        self._failure = self._failure or failure
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._failure is not None:
            raise LinkError(self._failure)


class _Poller:
    """Asks the operations that are under way, often while there is something to do."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._pending: list[_MpiOperation] = []
        self._is_new = False
        self._is_closed = False
        self._thread = FarcallThread(self._run, name)
        refused = self._thread.try_start()
        if refused is not None:
            raise RendezvousError(f"no thread for mpi: {refused}")

    def add(self, operation: _MpiOperation) -> None:
        with self._changed:
            self._pending.append(operation)
            self._is_new = True
            self._changed.notify()
            is_closed = self._is_closed
        if is_closed:
            self._give_up()

    def _run(self) -> None:
        pause = _SHORT_PAUSE
        while True:
            with self._changed:
                if self._is_closed:
                    break
                if self._is_new:
                    pause = _SHORT_PAUSE
                self._is_new = False
                pending = list(self._pending)
            over = {id(one) for one in pending if one.is_over()}
            with self._changed:
                if over:
                    pause = _SHORT_PAUSE
                    self._pending = [one for one in self._pending if id(one) not in over]
                elif not self._is_new and not self._is_closed:
                    self._changed.wait(pause if pending else None)
                    pause = min(2 * pause, _LONG_PAUSE)
            for one in pending:
                if id(one) in over:
                    one.end(None)
        self._give_up()

    def _give_up(self) -> None:
        with self._changed:
            pending, self._pending = self._pending, []
        # torch ends the process when an operation that is not over is destroyed, and mpi may still
        # write to the memory of each: these stay for good.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))
        for one in pending:
            one.end("the process group is closed")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()


class MpiGroup:
    """See `group.RankGroup`. Blocks until all ranks are there.

    Args:
        rank: of this process; mpi must agree.
        size: how many ranks there are; mpi must agree.

    Raises:
        RendezvousError: mpi has other ranks, or this torch has no mpi.
    """

    scheme = "mpi"
    notices_ends = False

    def __init__(self, rank: int, size: int) -> None:
        if _Mpi is None:
            raise RendezvousError(
                "this build of torch has no mpi: use group_backend='gloo', or torch built with mpi"
            )
        world = _Mpi.create([])
        if (world.rank(), world.size()) != (rank, size):
            raise RendezvousError(
                f"init_rpc was called with rank {rank} of {size}, but mpi started this process as "
                f"rank {world.rank()} of {world.size()}"
            )
        self.rank = rank
        self.size = size
        self._mpi: Any = _Mpi.create(list(range(size)))  # its messages meet no others
        self._poller = _Poller(f"farcall mpi {rank}")

    def send(self, to: int, tag: int, memory: Buffer) -> _MpiOperation:
        return self._begin(self._mpi.send, to, tag, memory)

    def receive(self, source: int, tag: int, memory: Buffer) -> _MpiOperation:
        return self._begin(self._mpi.recv, source, tag, memory)

    def _begin(self, do: Any, other: int, tag: int, memory: Buffer) -> _MpiOperation:
        tensors = [tensor_over(chunk) for chunk in _chunks(memoryview(memory))]
        works: list[Any] = []
        operation = _MpiOperation(works, tensors)
        try:
            works.extend(do([tensor], other, tag) for tensor in tensors)
        except RuntimeError as error:
            raise LinkError(f"mpi failed: {error}") from error
        finally:
            self._poller.add(operation)  # also if it was begun only in part
        return operation

    def close(self) -> None:
        self._poller.close()

    def free(self) -> None:
        self._mpi = None


def _chunks(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), CHUNK):
        yield memory[start : start + CHUNK]
