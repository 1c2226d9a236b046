"""A process that dials in: our side of the handshake, and the decisions about it on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from farcall.ids import original
from farcall.transport.connect import handshake
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.handshake_messages import Identity, Unfinished
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.multi_stream import StreamRegistry

# Links with one worker, in both directions: it has one in each, and some that end just now.
MOST_LINKS = 8
# Descriptors that links leave to the program: fewer than visitors leave (`visitors.py`), so that a
# member gets in while a flood of strangers has all that it may have.
SPARE_OF_LINKS = 8


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    return os.sysconf("SC_OPEN_MAX")


def _no_links(begun: int) -> int:
    return 0


class Guest:
    """Begins a handshake.

    Args:
        me: what to say of ourselves.
        terms: the credential that is required of it, and shown.
        listening: whom to let in.
        registry: the links that it may join.
        fd: the descriptor of the connection.
        links: gives the number of links with a worker, whose incarnation began so (`ids.original`).

    Attributes:
        conversation: our side of it.
        reason: why the worker did not admit it, or None.
        expects: the name of its link, once others may join that; empty if none may.
    """

    def __init__(
        self,
        me: Identity,
        terms: Terms,
        listening: Listening,
        registry: StreamRegistry[Any],
        fd: int = -1,
        links: Callable[[int], int] = _no_links,
    ) -> None:
        self.me = me
        self._fd = fd
        self._links = links
        self._listening = listening
        self._registry = registry
        self.reason: str | None = None
        self.expects = b""
        self.conversation = handshake.accepting(
            me, terms, admit=self._admit, meeting=listening.meeting
        )

    def _admit(self, peer: Identity) -> str | None:
        if peer.asks:
            return None
        self._check_room(peer)
        self.reason = self._listening.vouch(peer)
        if self.reason is None and not peer.joins:
            self.reason = self._listening.admit(peer.name, peer.incarnation, peer.meeting)
        if self.reason is None:
            self.reason = self._registry.admit(peer, self.me)
            if self.reason is None and not peer.joins:
                self.expects = peer.link
        return self.reason

    def _check_room(self, peer: Identity) -> None:
        """Keep a member from taking all descriptors of this process.

        Raises:
            Unfinished: it has had its share. A member that is honest tries again.
        """
        limit = descriptor_limit()
        # The system gives out the lowest descriptor that is free.
        if self._fd >= limit - SPARE_OF_LINKS:
            raise Unfinished(
                f"this process has hardly any of its {limit} descriptors left: raise the limit "
                "(ulimit -n)"
            )
        links = self._links(original(peer.incarnation))
        if links >= MOST_LINKS and not peer.joins:
            raise Unfinished(f"worker {peer.name!r} has {links} links to this one already")

    def turn_away(self) -> None:
        """Let no thread wait for a link: none comes of it."""
        if self.expects:
            self._registry.failed(self.expects)
