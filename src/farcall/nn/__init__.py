"""Modules that live on other workers."""

from farcall.nn.owner import FUNCTIONS
from farcall.nn.remote_module import RemoteModule

__all__ = ["FUNCTIONS", "RemoteModule"]


def __dir__() -> list[str]:
    return __all__
