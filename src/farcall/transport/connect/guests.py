"""Somebody who dials in: our side of the handshake, and what was decided about it on the way."""

from __future__ import annotations

from typing import Any

from farcall.transport.connect import handshake
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.multi_stream import StreamRegistry


class Guest:
    """Begins a handshake.

    Args:
        me: what to say of ourselves.
        terms: what is required of it, and shown.
        listening: whom to let in.
        joinable: the links that it may join.

    Attributes:
        conversation: our side of it.
        reason: why the worker did not admit it, or None.
        expects: the name of its link, once others may join that; empty if none may.
    """

    def __init__(
        self, me: Identity, terms: Terms, listening: Listening, joinable: StreamRegistry[Any]
    ) -> None:
        self.me = me
        self._listening = listening
        self._joinable = joinable
        self.reason: str | None = None
        self.expects = b""
        self.conversation = handshake.accepting(
            me, terms, admit=self._admit, meeting=listening.meeting
        )

    def _admit(self, peer: Identity) -> str | None:
        if peer.asks:
            return None
        self.reason = self._listening.vouch(peer)
        if self.reason is None and not peer.joins:
            self.reason = self._listening.admit(peer.name, peer.incarnation, peer.meeting)
        if self.reason is None:
            self.reason = self._joinable.admit(peer, self.me)
            if self.reason is None and not peer.joins:
                self.expects = peer.link
        return self.reason

    def turn_away(self) -> None:
        """No link comes of it: let nobody wait for that."""
        if self.expects:
            self._joinable.failed(self.expects)
