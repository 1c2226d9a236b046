"""Modules that live on other workers."""

from farcall.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
