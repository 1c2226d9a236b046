"""Tensors that lie in shared memory: what a transport needs to lend that memory to the peer.

Pickle sees a buffer like any other. Its exporter says which file it lies in, to a transport that
asks; the others copy the bytes. Stateless; safe from any thread.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    _Bytes = np.ndarray[Any, np.dtype[np.uint8]]
else:
    _Bytes = np.ndarray


class SharedBytes(_Bytes):
    """Flat bytes of a storage in shared memory. The compiled serializer has one of its own."""

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
    # Asking torch for a descriptor moves what was shared by the name of a file
    # (`set_sharing_strategy("file_system")`) to another place, where nobody shares it. Such memory
    # does not begin with its file: torch counts who shares it in front of it.
    if address % mmap.PAGESIZE or not storage.is_shared():
        return None
    descriptor, _ = storage._share_fd_cpu_()
    # A file that was mapped by name has none (`UntypedStorage.from_file`).
    return (descriptor, address) if descriptor >= 0 else None


def export(array: _Bytes, storage: torch.UntypedStorage) -> Any:
    """An exporter of the array's memory, for pickle. `storage` is what the array lies in."""
    if not storage.is_shared():
        return array.data
    shared = array.view(SharedBytes)
    shared.storage = storage
    return shared
