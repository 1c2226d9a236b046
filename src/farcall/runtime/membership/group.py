"""The group as a whole, for an agent's users: see who is there, and exchange values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from farcall.runtime.membership.directory import Directory, Find
from farcall.runtime.membership.gatherings import Gatherings
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.roll_call import Everybody, RollCall
from farcall.runtime.membership.roster import Roster
from farcall.runtime.status import Status
from farcall.runtime.threads.delayed_work import DelayedWork
from farcall.transport.base import Endpoint


class Extension(Protocol):
    """The state that a layer above keeps with an agent."""

    def close(self) -> None:
        """End what this state holds: the agent has shut down."""


E = TypeVar("E", bound=Extension)


class AgentGroup:
    """The group of an agent.

    Args:
        find, everybody: ask the store for a worker, and for all; None for a group of fixed size.
        enter: called in each thread that runs functions of users, before them.

    Attributes:
        roster: the workers that are there.
        gatherings: exchanges of values.
        later: does work later.
    """

    def __init__(
        self,
        status: Status,
        endpoint: Endpoint,
        directory: Directory,
        links: Links,
        losses: Losses,
        find: Find | None,
        everybody: Everybody | None,
        enter: Callable[[], None],
    ) -> None:
        roll_call = RollCall(status.me.name, everybody, find, endpoint, directory, links, losses)
        self.roster = Roster(status, directory, roll_call, enter)
        self.gatherings = Gatherings(status, directory, losses, roll_call)
        self.later = DelayedWork(status, enter)
        self._lock = threading.Lock()
        self._extensions: dict[type[Any], Extension] = {}

    def extension(self, kind: type[E], make: Callable[[], E]) -> E:
        """Return the object of a kind that a layer above keeps with this agent. Thread-safe.

        Args:
            make: makes it, at the first call.
        """
        with self._lock:
            found: Any = self._extensions.get(kind)
            if found is None:
                found = self._extensions[kind] = make()
            return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the extensions and the threads of the group: the agent has shut down."""
        with self._lock:
            extensions = list(self._extensions.values())
        for extension in extensions:
            extension.close()
        self.later.close()
        self.roster.close()
        self.gatherings.close()
