"""The places of functions: which have a thread of the agent, and whose they are."""

from __future__ import annotations

from collections.abc import Hashable

Place = tuple[int, Hashable]  # the depth of a function, see `function_queue`, and its caller
OWN: Place = (1, None)  # of what a worker does by itself


class Places:
    """The threads of an agent that run functions. The executor holds its lock around every method.

    Args:
        most: how many functions may run at once, those that wait not counted.
        guests: how many more may, each for a caller that would have none: QUEUE-4.

    Attributes:
        running: what each thread runs that runs a function.
        away: the same of threads whose functions wait, or which run what may be callbacks.
    """

    def __init__(self, most: int, guests: int) -> None:
        self.most = most
        self.running: dict[int, Place] = {}
        self.away: dict[int, Place] = {}
        self._with_guests = most + guests

    def may_run(self, caller: Hashable) -> bool:
        """Return whether there is a place for one more function of this caller."""
        count = len(self.running)
        return count < self.most or (count < self._with_guests and caller not in self.served())

    @property
    def is_any_free(self) -> bool:
        """Return whether there is a place, for one caller or another."""
        return len(self.running) < self._with_guests

    def refused(self) -> set[Hashable]:
        """Return the callers for which there is no place, if there is one for others."""
        return set() if len(self.running) < self.most else self.served()

    # Each list is made in one step: functions end meanwhile, without the lock.

    def served(self) -> set[Hashable]:
        """Return the callers whose functions run."""
        return {caller for _, caller in list(self.running.values())}

    def taken(self) -> list[int]:
        """Return the depth of each function that has a thread."""
        places = [*list(self.running.values()), *list(self.away.values())]
        return [depth for depth, _ in places]
