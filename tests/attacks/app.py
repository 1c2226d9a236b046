"""The program of the worker under attack: functions that it offers, and others."""

from __future__ import annotations

import dataclasses
import enum
import os
import traceback
from pathlib import Path
from typing import Any

import torch

from farcall import rpc

system = os.system  # as a module has what it imports


@dataclasses.dataclass
class Point:
    """A type that may arrive."""

    x: int
    y: int


class Access(enum.Flag):
    """Flags that may arrive, in 2^20 combinations."""

    _ignore_ = ["number"]
    for number in range(20):
        vars()[f"BIT_{number}"] = 1 << number


def combinations() -> int:
    """Return how many combinations the class keeps, for as long as the process runs."""
    return len(Access._value2member_map_)


@dataclasses.dataclass
class Unlisted:
    """A type that may not."""

    x: int


class Counter:
    """A value that is reached through references."""

    def __init__(self) -> None:
        self.count = 0
        self.run = os.system  # an attribute that can be called

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def reset(self) -> None:
        """Reset the count. Callers may not call this."""
        self.count = 0


def call_back(to: str) -> None:
    """Call the caller, and let its error go on to it."""
    rpc.rpc_sync(to, truth, args=(1,))


def printed_error(to: str) -> str:
    """Call, and return the printed error."""
    try:
        rpc.rpc_sync(to, truth, args=(1,))
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


def truth(value: Any) -> bool:
    return bool(value)


def use(value: Any) -> int:
    """Do with a value what programs do."""
    return len(repr(value)) + hash(str(value))


def point_sum(point: Point) -> int:
    return point.x + point.y


_mapped: list[torch.Tensor] = []


def lies_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether the indices of a sparse tensor lie where its sender can still write."""
    indices = tensor._indices() if tensor.layout is torch.sparse_coo else tensor.crow_indices()
    address = indices.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, rest = line.partition(" ")
        begin, end = (int(part, 16) for part in where.split("-"))
        if begin <= address < end:
            return " rw-s " in f" {rest}" or " r--s " in f" {rest}"
    return False


_secret: list[Any] = []


def keep_reference(rref: Any) -> None:
    _secret.append(rref)


ALLOWED = [
    "app:Counter",
    "app:Counter.add",
    "app:call_back",
    "app:keep_reference",
    "app:lies_in_shared_memory",
    "app:point_sum",
    "app:truth",
    "app:use",
]
