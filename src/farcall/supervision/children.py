"""The wishes of users for supervised objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farcall.ids import WorkerInfo
from farcall.runtime.options.timeouts import validate_timeout


@dataclass(frozen=True)
class Snapshot:
    """The way to keep the state of a supervised object, for the case that its worker dies.

    Args:
        every: seconds between two snapshots.
        save: the method that returns the state, such as "state_dict"; None: the state is a copy of
            the object itself, and nothing is made from scratch when it is restored.
        load: the method that takes the state, such as "load_state_dict", after the factory has made
            the object again.

    Raises:
        ValueError, TypeError: these make no sense.
    """

    every: float
    save: str | None = None
    load: str | None = None

    def __post_init__(self) -> None:
        if validate_timeout(self.every) <= 0:
            raise ValueError("a snapshot needs a number of seconds above 0: every=")
        if (self.save is None) != (self.load is None):
            raise ValueError("a snapshot has both save= and load=, or neither")


@dataclass(frozen=True)
class Child:
    """One of several objects that are supervised together. See `farcall.rpc.supervise`."""

    factory: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    on: str | WorkerInfo = ""
    name: str | None = None
    snapshot: float | Snapshot | None = None
    concurrency: int | None = None
