"""Functions that are replaced as long as calls are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacements:
    """Replaced objects, to be put back. Not thread-safe."""

    def __init__(self) -> None:
        self._originals: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], object]) -> None:
        """Replace an attribute of a class or a module by what `make` makes of it."""
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        """Put the originals back."""
        while self._originals:
            setattr(*self._originals.pop())
