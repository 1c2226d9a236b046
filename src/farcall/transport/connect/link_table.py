"""The links of an endpoint that are not lost, and how many each peer has."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from farcall.ids import original
from farcall.transport.connect.connection import KeptLink

L = TypeVar("L", bound=KeptLink)


class LinkTable(Generic[L]):
    """Its owner holds a lock around everything but `count`."""

    def __init__(self) -> None:
        self._links: dict[L, None] = {}  # in the order in which they were made
        self._counts: Counter[int] = Counter()

    def add(self, link: L) -> None:
        """Add a link that is not there yet."""
        self._links[link] = None
        self._counts[original(link.peer.incarnation)] += 1

    def discard(self, link: L) -> bool:
        """Take a link out, and return whether it was there."""
        if link not in self._links:
            return False
        del self._links[link]
        begun = original(link.peer.incarnation)
        self._counts[begun] -= 1
        if not self._counts[begun]:
            del self._counts[begun]
        return True

    def all(self) -> list[L]:
        """Return every link."""
        return list(self._links)

    def of_peer(self, incarnation: int) -> list[L]:
        """Return the links that lead to one incarnation."""
        return [link for link in self._links if link.peer.incarnation == incarnation]

    def count(self, begun: int) -> int:
        """Return the number of links with a worker, in all of its meetings (`ids.original`)."""
        return self._counts[begun]
