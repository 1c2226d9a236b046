"""Objects on other workers that are used as if they were here: `actor`, `spawn`, `Handle`."""

from __future__ import annotations

from farcall.actors.handles import Handle, actor, handle, spawn
from farcall.actors.members import ObjectMember

__all__ = ["Handle", "ObjectMember", "actor", "handle", "spawn"]


def __dir__() -> list[str]:
    return __all__
