"""The locks under which parameters are updated.

PyTorch has one lock for all optimizers of a process. Here each parameter has one, which it shares
with the parameters that were first given to an optimizer together: so every optimizer normally
holds a single lock during a step, optimizers of different models never wait for each other, and
several optimizers of the same parameters (each trainer makes its own) do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from farcall.runtime.context import waiting
from farcall.transport.uninterrupted import Lock, take


class _Lock:
    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


class ParameterLocks:
    """The locks of some parameters. Thread-safe."""

    # Parameters are objects of the process, whichever agent uses them: that is where their locks
    # belong. An attribute of the parameter would be pickled with it.
    _known: Any = WeakTensorKeyDictionary()
    _finding = threading.Lock()
    _numbers = count()

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._locks: list[_Lock] = []
        self.add(parameters)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Cover these parameters, too."""
        with self._finding:
            own = _Lock(next(self._numbers))
            locks = {self._known.setdefault(parameter, own) for parameter in parameters}
        # All handles acquire them in the same order, so none waits in a circle.
        self._locks = sorted(locks.union(self._locks), key=lambda lock: lock.number)

    def held(self) -> holding:
        """Keep other threads from updating these parameters in the block."""
        return holding(*[lock.lock for lock in self._locks])


class holding:  # noqa: N801 - a context manager
    """Hold locks. While it waits for one, a handler leaves its place to another.

    Else handlers that wait could take all places, and the calls of the lock's holder find none.
    """

    __slots__ = ("_held", "_locks")

    def __init__(self, *locks: Lock) -> None:
        self._locks = locks
        self._held: list[Lock] = []

    def __enter__(self) -> None:
        try:
            for lock in self._locks:
                if take(lock):
                    self._held.append(lock)
                    continue
                with waiting():
                    if take(lock, threading.TIMEOUT_MAX):
                        self._held.append(lock)
        except BaseException:  # KeyboardInterrupt
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        held = self._held
        while held:
            lock = held[-1]
            del held[-1]
            lock.release()
