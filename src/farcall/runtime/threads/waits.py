"""Waits inside functions: those of farcall, which say so, and those of torch, which do not."""

from __future__ import annotations

from typing import Protocol

import torch

from farcall.runtime.threads.thread_stacks import current_frames

_TORCH_WAITS = (torch.futures.wait_all.__code__, torch.futures.Future.wait.__code__)


class LeavesPlaces(Protocol):
    """The part of an executor by which a waiting function leaves its place. See `Executor`."""

    def leave(self, me: int) -> bool:
        """Let the calling thread wait. Return whether it runs a function."""

    def come_back(self, me: int) -> None:
        """Note that the wait of a thread that runs a function is over."""


class Wait:
    """One wait of farcall. See `Executor.waiting`."""

    __slots__ = ("_executor", "_me", "_ran")

    def __init__(self, executor: LeavesPlaces, me: int) -> None:
        self._executor = executor
        self._me = me

    def __enter__(self) -> None:
        self._ran = self._executor.leave(self._me)

    def __exit__(self, *_: object) -> None:
        if self._ran:
            self._executor.come_back(self._me)


def threads_in_torch_waits() -> set[int]:
    """Return the idents of the threads that sit in a wait of torch's."""
    return {thread for thread, frame in current_frames().items() if frame.f_code in _TORCH_WAITS}
