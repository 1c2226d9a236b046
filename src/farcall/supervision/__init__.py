"""Objects that are made again when their worker dies: `rpc.supervise`, and references that follow.

Every worker of a group knows each supervision, and one supervises it: see `supervisors`. The rules
are those of `farcall.protocol.supervision`.
"""

from __future__ import annotations

from farcall.supervision.api import get_object, supervise
from farcall.supervision.children import Child, Snapshot

__all__ = ["Child", "Snapshot", "get_object", "supervise"]


def __dir__() -> list[str]:
    return __all__
