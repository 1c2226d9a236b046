"""A user's class, for the programs beside it."""

from __future__ import annotations

from collections.abc import Iterator

import farcall
from farcall import rpc


@farcall.actor
class Buffer:
    total = 0

    def __init__(self, capacity: int, start: float = 0.0) -> None:
        self.capacity = capacity
        self.start = start
        self.items: list[float] = []

    def put(self, item: float) -> None:
        self.items.append(item)

    def sample(self, count: int, *, newest: bool = False) -> list[float]:
        """Return some items."""
        return self.items[-count:] if newest else self.items[:count]

    @rpc.functions.async_execution
    def later(self, count: int) -> rpc.Future[float]:
        raise NotImplementedError

    @staticmethod
    def double(item: float) -> float:
        return 2 * item

    @property
    def newest(self) -> float:
        return self.items[-1]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> float:
        return self.items[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self.items)


class Plain:
    """A class without a length, whose arguments are called as options of `spawn`."""

    def __init__(self, word: str) -> None:
        self.word = word
