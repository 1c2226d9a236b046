"""What an agent's users do with the group as a whole: see who is there, and exchange values."""

from __future__ import annotations

from collections.abc import Callable

from farcall.runtime.membership.directory import Directory, Find
from farcall.runtime.membership.gatherings import Gatherings
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.roll_call import Everybody, RollCall
from farcall.runtime.membership.roster import Roster
from farcall.runtime.status import Status
from farcall.transport.base import Endpoint


class Group:
    """The group of an agent.

    Args:
        find, everybody: ask the store for a worker, and for all; None for a group of fixed size.
        enter: called in each thread that runs functions of users, before them.

    Attributes:
        roster: who is there.
        gatherings: exchanges of values.
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

    def close(self) -> None:
        """The agent has shut down."""
        self.roster.close()
        self.gatherings.close()
