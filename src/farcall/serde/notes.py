"""Notes that are taken while one message is pickled."""

from __future__ import annotations

from typing import Any

import torch

from farcall.serde.sharing import BlockPlace, Plan, key_of


class Notes:
    """Notes on one message: the memory that was met, and where to find common memory.

    Attributes:
        memory: dense CPU tensors and CPU storages, each as often as it was met.
        begins: where their storages begin.
        plan: where each of those lies that have memory in common; empty until that is known.
    """

    __slots__ = ("begins", "memory", "plan")

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.begins: set[int] = set()
        self.plan: Plan = {}

    def note(self, value: torch.Tensor | torch.UntypedStorage, begin: int) -> None:
        """Note that the message holds it, whose storage begins there."""
        self.memory.append(value)
        self.begins.add(begin)

    def clear(self) -> None:
        self.memory.clear()
        self.begins.clear()
        self.plan = {}

    def place_of(self, value: torch.Tensor | torch.UntypedStorage) -> BlockPlace | None:
        """Return its place in common memory, or None if it has none, as far as is known."""
        return self.plan.get(key_of(value)) if self.plan else None
