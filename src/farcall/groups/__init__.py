"""Groups of workers that a script, a notebook or a test starts itself: `farcall.local`."""

from farcall.groups.group import AllWorkers, Group, GroupWorker
from farcall.groups.local import local

__all__ = ["AllWorkers", "Group", "GroupWorker", "local"]


def __dir__() -> list[str]:
    return __all__
