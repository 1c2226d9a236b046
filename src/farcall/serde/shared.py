"""The memory of tensors as buffers, and the file that it lies in where it is shared.

Pickle sees a buffer like any other. Its exporter says which file it lies in, to a transport that
asks; the others copy the bytes. Stateless; safe from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from farcall.torch_internals import share_fd_cpu


class TensorBytes(ctypes.c_ubyte * sys.maxsize):  # type: ignore[misc]
    """Bytes from the beginning of a tensor's memory on, far beyond its end: only slices are used.

    torch's tensors export no buffer, and a ctypes array keeps its attributes alive. One type
    serves all sizes, since making a type takes longer than all the rest. The compiled serializer
    has an exporter of its own.
    """

    storage: torch.UntypedStorage

    def file_and_address(self) -> tuple[int, int] | None:
        """Return the file and address of a storage, for a transport."""
        return file_and_address(self.storage)


def file_and_address(storage: torch.UntypedStorage) -> tuple[int, int] | None:
    """Return the descriptor of the file that a CPU storage lies in, and where it is mapped.

    Return None if it does not lie in shared memory, or if that has no descriptor. The descriptor is
    torch's own, open as long as the storage is there.
    """
    address = storage.data_ptr()
    # Asking torch for a descriptor moves memory that was shared by the name of a file
    # (`set_sharing_strategy("file_system")`) to another place, where no process shares it. It
    # does not begin with its file: torch counts who shares it in front of it.
    if address % mmap.PAGESIZE or not storage.is_shared():
        return None
    descriptor, _ = share_fd_cpu(storage)()
    # A file that was mapped by name has none (`UntypedStorage.from_file`).
    return (descriptor, address) if descriptor >= 0 else None


def export(address: int, length: int, storage: torch.UntypedStorage) -> memoryview:
    """Return `length` bytes at this address, which lie in `storage`, and keep the storage alive."""
    memory = TensorBytes.from_address(address)
    memory.storage = storage
    return memoryview(memory)[:length]
