"""Modules that live on other workers."""

from farcall.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]


def __dir__() -> list[str]:
    return __all__
