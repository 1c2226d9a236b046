"""Storages that several tensors of one message have in common: where each lies in the message.

The picklers note the memory of each dense CPU tensor and each storage that they meet. If memory was
met twice, the message is pickled a second time with the plan that is made here. Then the common
memory is a storage of its own in the pickle, and the tensors are views of it. Messages without
common memory, nearly all of them, pay for the notes only.

Spans of one storage that overlap or touch travel as one block. All spans of a storage travel as one
block, too, unless that would be mostly holes. In a block that is mostly holes by itself (columns of
a large matrix) only tensors that cover the very same elements stay together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

HOLES_ALLOWED_BYTES = 8 << 10
# The widest element: a block begins at a multiple of it, so that all views can be counted from it.
_ALIGNMENT = 16

Key = tuple[Any, ...]


class Block:
    """Memory that several tensors share. Pickle meets one object, and so sends it once."""

    __slots__ = ("_reduced",)

    def __init__(self, reduced: Callable[[], Any]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced()


class BlockPlace(NamedTuple):
    """The place of a tensor or storage in a block: bytes from the block's begin, and its stride."""

    block: Block
    offset: int
    stride: tuple[int, ...]


class _Span(NamedTuple):
    value: Any
    storage: torch.UntypedStorage
    begin: int  # in the storage, in bytes
    end: int
    used: int  # bytes of elements


Plan = dict[Key, BlockPlace]
# A function that makes the reduction of a storage over some bytes of another.
ReduceSpan = Callable[[torch.UntypedStorage, int, int], Any]


def key_of(value: torch.Tensor | torch.UntypedStorage) -> Key:
    """Say which memory it covers."""
    if isinstance(value, torch.UntypedStorage):
        return value.data_ptr(), value.nbytes()
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def plan_of(noted: Sequence[Any], reduce_span: ReduceSpan) -> Plan:
    """Return the place of everything noted that has memory in common with something else."""
    by_storage: dict[int, list[Any]] = defaultdict(list)
    storages: dict[int, torch.UntypedStorage] = {}
    for value in noted:
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()
        begin = storage.data_ptr()
        by_storage[begin].append(value)
        known = storages.setdefault(begin, storage)
        if storage.nbytes() > known.nbytes():  # two storages over one numpy array
            storages[begin] = storage
    plan: Plan = {}
    for begin, values in by_storage.items():
        storage = storages[begin]
        spans = [] if len(values) < 2 else [_span(value, storage) for value in values]
        if any(span.end > storage.nbytes() for span in spans):
            continue  # freed behind the tensor's back: left to the error of a tensor by itself
        for group in _blocks(spans):
            if len(group) > 1:
                _place(plan, group, reduce_span)
    return plan


def _span(value: Any, storage: torch.UntypedStorage) -> _Span:
    if isinstance(value, torch.UntypedStorage):
        return _Span(value, storage, 0, value.nbytes(), value.nbytes())
    begin = value.data_ptr() - storage.data_ptr()
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return _Span(value, storage, begin, begin + (last + 1) * value.itemsize, value.nbytes)


def _blocks(spans: list[_Span]) -> list[list[_Span]]:
    if not spans or _has_few_holes(spans):
        return [spans]
    groups: list[list[_Span]] = []
    end = -1
    for span in sorted(spans, key=lambda span: span.begin):
        if groups and span.begin <= end:
            groups[-1].append(span)
        else:
            groups.append([span])
        end = max(end, span.end)
    return groups


def _has_few_holes(spans: Sequence[_Span]) -> bool:
    covered = max(span.end for span in spans) - min(span.begin for span in spans)
    return covered <= max(2 * sum(span.used for span in spans), HOLES_ALLOWED_BYTES)


def _place(plan: Plan, group: list[_Span], reduce_span: ReduceSpan) -> None:
    storage = group[0].storage
    if _has_few_holes(group):
        begin = min(span.begin for span in group) // _ALIGNMENT * _ALIGNMENT
        end = max(span.end for span in group)
        block = Block(lambda: reduce_span(storage, begin, end))
        for span in group:
            stride = span.value.stride() if isinstance(span.value, torch.Tensor) else ()
            plan[key_of(span.value)] = BlockPlace(block, span.begin - begin, stride)
        return
    equal: dict[Key, list[_Span]] = defaultdict(list)
    for span in group:
        equal[key_of(span.value)].append(span)
    for key, same in equal.items():
        if len(same) > 1:
            plan[key] = _compact(same[0].value, reduce_span)


def _compact(value: torch.Tensor, reduce_span: ReduceSpan) -> BlockPlace:
    # Without the bits of conjugated and negated views, which go beside the memory.
    bare = torch.empty(0, dtype=value.dtype)
    bare.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    copy = bare.clone(memory_format=torch.preserve_format)
    storage = copy.untyped_storage()
    return BlockPlace(Block(lambda: reduce_span(storage, 0, storage.nbytes())), 0, copy.stride())
