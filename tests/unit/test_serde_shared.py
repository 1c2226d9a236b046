"""The tensors that need no copy (zero-copy): those in shared memory that has a descriptor."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farcall.serde.pickling import FastPickler
from farcall.serde.serializer import Serializer
from farcall.serde.shared import TensorBytes
from farcall.serde.tensors import INLINE_BYTES

SIZE = INLINE_BYTES  # elements


@pytest.fixture
def by_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def exporter(tensor: torch.Tensor) -> Any:
    """Return the object that gives out the memory of a tensor that is pickled."""
    (buffer,) = FastPickler(None, None, {}).dump(tensor, None).buffers
    assert buffer.tobytes() == tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return buffer.obj.obj  # the buffer is a slice of it


def test_shared_tensor_names_the_file_that_holds_it() -> None:
    tensor = torch.arange(2 * SIZE).share_memory_()
    shared = exporter(tensor[SIZE:])
    assert isinstance(shared, TensorBytes)
    found = shared.file_and_address()
    assert found is not None
    descriptor, address = found
    assert address == tensor.data_ptr()
    with mmap.mmap(descriptor, tensor.nbytes) as memory:
        tensor[3] = 77
        assert memory[3 * 8] == 77


def test_either_half_of_the_serializer_names_it() -> None:
    tensor = torch.arange(SIZE).share_memory_()
    (buffer,) = Serializer().dump(tensor).buffers
    assert buffer.obj.file_and_address() == exporter(tensor).file_and_address() is not None
    for other in (torch.zeros(SIZE), torch.zeros(2 * SIZE)[SIZE:]):
        (buffer,) = Serializer().dump(other).buffers
        find = getattr(buffer.obj, "file_and_address", lambda: None)
        assert find() is None


def test_descriptor_stays_open_as_long_as_the_buffer_is_there() -> None:
    shared = exporter(torch.zeros(SIZE).share_memory_())
    descriptor, _ = shared.file_and_address()
    os.fstat(descriptor)
    del shared
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_parameters_are_shared_as_well() -> None:
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    parameter.share_memory_()
    assert exporter(parameter).file_and_address() is not None


def test_other_tensors_name_no_file() -> None:
    assert exporter(torch.zeros(SIZE)).file_and_address() is None
    assert exporter(torch.zeros(2 * SIZE)[SIZE:]).file_and_address() is None


def test_tensor_that_is_copied_before_it_is_sent_names_no_file() -> None:
    shared = torch.zeros(SIZE, dtype=torch.complex64).share_memory_()
    (buffer,) = FastPickler(None, None, {}).dump(shared.conj(), None).buffers
    assert buffer.obj.obj.file_and_address() is None


@pytest.mark.usefixtures("by_name")
def test_memory_shared_by_name_stays_where_it_is_and_names_no_file() -> None:
    tensor = torch.arange(SIZE).share_memory_()
    place = tensor.data_ptr()
    assert tensor.is_shared()
    assert exporter(tensor).file_and_address() is None
    assert tensor.data_ptr() == place


def test_mapped_file_names_no_file(tmp_path: Path) -> None:
    tensor = torch.from_file(str(tmp_path / "file"), shared=True, size=SIZE, dtype=torch.float32)
    assert tensor.is_shared()
    assert exporter(tensor).file_and_address() is None


def test_without_a_transport_that_asks_it_is_a_buffer_like_any_other() -> None:
    tensor = torch.arange(SIZE).share_memory_()
    payload = FastPickler(None, None, {}).dump(tensor, None)
    arrived = pickle.loads(payload.body, buffers=[bytes(buffer) for buffer in payload.buffers])
    tensor[0] = 5
    assert arrived[0] == 0
    assert torch.equal(arrived[1:], tensor[1:])
