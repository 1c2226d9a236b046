"""A process group over gloo, made for RPC alone: `init_process_group`'s state is neither used nor
touched, so a program may have its own groups beside it, or none.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall import torch_internals as internals
from farcall.errors import LinkError, RendezvousError
from farcall.wire.messages import Buffer

# None if torch was built without it. Any, since torch's stubs say nothing of what it can do.
_Gloo: Any = getattr(torch.distributed, "ProcessGroupGloo", None)

# A wait of gloo that runs out of time closes every connection of its context.
NO_LIMIT = timedelta(days=3650)
_CLOSING_TAG = 0


class _GlooOperation:
    """See `group.Operation`."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor  # gloo keeps no reference

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _link_error(error) from error


class GlooGroup:
    """See `group.RankGroup`. Blocks until all ranks are there, so each needs its own
    thread or process.

    Args:
        store: where the ranks meet; used by this group alone.
        rank: of this process, 0 to size - 1.
        size: how many ranks there are.
        host: to listen on: a name or address of this machine that the others can reach.

    Raises:
        RendezvousError: this torch has no gloo.
        RuntimeError: gloo can't listen, or can't reach another rank.
    """

    scheme = "gloo"
    notices_ends = True

    def __init__(self, store: Store, rank: int, size: int, host: str) -> None:
        if _Gloo is None:
            raise RendezvousError("this build of torch has no gloo, which PROCESS_GROUP needs")
        self.rank = rank
        self.size = size
        options = internals.GlooOptions()
        internals.assign(options, "timeout_of_options", NO_LIMIT)
        # For collectives; there are none.
        internals.assign(options, "threads_of_options", 1)
        device = _Gloo.create_device(hostname=host, lazy_init=False)
        internals.assign(options, "devices_of_options", [device])
        self._gloo: Any = _Gloo(store, rank, size, options)

    def send(self, to: int, tag: int, memory: Buffer) -> _GlooOperation:
        tensor = tensor_over(memory)
        try:
            return _GlooOperation(self._gloo.send([tensor], to, tag), tensor)
        except RuntimeError as error:
            raise _link_error(error) from error

    def receive(self, source: int, tag: int, memory: Buffer) -> _GlooOperation:
        tensor = tensor_over(memory)
        try:
            return _GlooOperation(self._gloo.recv([tensor], source, tag), tensor)
        except RuntimeError as error:
            raise _link_error(error) from error

    def close(self) -> None:
        # gloo's own function for this, `abort`, ends no wait. A wait that takes too long ends all,
        # if that rank is still there; if not, it fails at once.
        for other in range(self.size):
            if other != self.rank:
                with contextlib.suppress(RuntimeError):
                    work = self._gloo.recv([torch.empty(1)], other, _CLOSING_TAG)
                    work.wait(timedelta(milliseconds=1))

    def free(self) -> None:
        self._gloo = _Freed()


class _Freed:
    """In place of a freed group."""

    def send(self, *_: object) -> None:
        raise RuntimeError("this worker has shut down")

    recv = send


def tensor_over(memory: Buffer) -> torch.Tensor:
    """Return bytes as a tensor over the memory itself; a copy if that can't be written to."""
    view = memoryview(memory)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _link_error(error: RuntimeError) -> LinkError:
    """Return the error without the place in gloo's source, and without gloo's advice."""
    text = str(error).rpartition("] ")[2] if "] " in str(error) else str(error)
    return LinkError(f"the process group's connection is closed: {text.strip()[:200]}")
