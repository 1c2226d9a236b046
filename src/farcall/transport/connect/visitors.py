"""Connections that were accepted and have proven nothing yet, and the bounds on their cost.

They are few, and have little time. A holder of the credential needs two or three round trips; a
stranger may stay for `HELLO_SECONDS`, and then only as long as no newer one wants its place. So a
flood of strangers costs a bounded amount, and keeps no peer out that is quicker than the flood.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from farcall.transport.connect.conversation import PARTING_SECONDS, Stage
from farcall.transport.connect.guests import Guest, descriptor_limit
from farcall.transport.connect.handshake_messages import LIMIT

HELLO_SECONDS = 2.0  # from the connection to the peer's hello
PROOF_SECONDS = 5.0  # from the connection to its proof
MOST = 64
MOST_OF_ORIGIN = 16
SPARE_DESCRIPTORS = 16  # that are left to the program, by closing visitors
PIECES = 16  # that are received from one visitor before the others have their turn


class Visitor:
    """One of them. For one thread.

    Args:
        sock: of the connection; does not block.
        who: is at its other end, for people.
        origin: where it came from, see `origin_of`.
        guest: has our side of the handshake.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self, sock: socket.socket, who: str, origin: str, guest: Guest, now: float
    ) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.who = who
        self.origin = origin
        self.guest = guest
        self.conversation = guest.conversation
        self._began = now
        self._unsent = b""
        self._has_spoken = False  # in answer to what came last
        self._parts_until: float | None = None
        self._left = now

    @property
    def until(self) -> float:
        """When it has had its time."""
        if self._parts_until is not None:
            return self._parts_until
        is_silent = self.conversation.stage is Stage.SILENT
        return self._began + (HELLO_SECONDS if is_silent else PROOF_SECONDS)

    @property
    def may_leave(self) -> bool:
        """Return whether the next step may block, and nothing is left to be sent."""
        is_proven = self.conversation.stage is Stage.PROVEN
        return is_proven and not self.conversation.wants and not self._unsent

    @property
    def waits_to_send(self) -> bool:
        """Return whether it does not read what it was sent."""
        return bool(self._unsent)

    @property
    def parts(self) -> bool:
        """Return whether it was refused, and has yet to read why."""
        return self._parts_until is not None

    def leave(self, now: float) -> None:
        """Note that it goes to a thread that may block."""
        self._left = now
        self.sock.setblocking(True)

    def come_back(self, now: float) -> None:
        """Note that it is here again; the time that this worker took is none of its own."""
        self._began += now - self._left
        self.sock.setblocking(False)

    def advance(self) -> None:
        """Send and receive what can be without blocking, but for one that sends without an end.

        Raises:
            OSError: the connection has failed.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._send()
            for _ in range(PIECES):
                if not self.conversation.wants:
                    return
                self.conversation.receive(self.sock.recv(self.conversation.wants))
                self._send()
                if self._has_spoken:
                    return  # the answer takes a moment

    def _send(self) -> None:
        said = self.conversation.take()
        self._has_spoken = bool(said) or bool(self._unsent)
        self._unsent += said
        while self._unsent:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def part(self, now: float) -> bool:
        """Give it time to read why it was refused; else a reset takes that away from it.

        Returns:
            Whether it should stay for that.
        """
        if not self._has_spoken:
            return False
        self._parts_until = now + PARTING_SECONDS
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            return True
        return False

    def has_left(self) -> bool:
        """Return whether the peer has closed the connection, of one that parts."""
        try:
            return not self.sock.recv(LIMIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True


class Visitors:
    """All of an acceptor, the oldest first. For one thread."""

    def __init__(self) -> None:
        self._all: dict[int, Visitor] = {}  # by descriptor

    def __iter__(self) -> Iterator[Visitor]:
        return iter(list(self._all.values()))

    def add(self, visitor: Visitor) -> None:
        self._all[visitor.fd] = visitor

    def remove(self, visitor: Visitor) -> bool:
        """Take one out; return whether it was there."""
        return self._all.pop(visitor.fd, None) is not None

    def oldest(self, origin: str = "") -> Visitor | None:
        """Return the one that has to go first, of an origin or of all; none that is trusted.

        One that has knocked goes after all others.
        """
        some = (v for v in self._all.values() if origin in ("", v.origin))
        strangers = [visitor for visitor in some if not visitor.conversation.is_trusted]
        return min(strangers, key=lambda visitor: visitor.conversation.is_known, default=None)

    def in_the_way(self, newcomer: Visitor) -> Visitor | None:
        """Return the one that has to go since a newcomer is there, which is not among them yet."""
        origin = newcomer.origin
        if sum(visitor.origin == origin for visitor in self._all.values()) >= MOST_OF_ORIGIN:
            return self.oldest(origin)
        # The system gives out the lowest descriptor that is free.
        if len(self._all) >= MOST or newcomer.fd >= descriptor_limit() - SPARE_DESCRIPTORS:
            return self.oldest()
        return None

    def late(self, now: float) -> list[Visitor]:
        """Return those whose time is over."""
        return [visitor for visitor in self._all.values() if visitor.until <= now]

    def next_end(self) -> float | None:
        """Return when the time of the next one is over."""
        return min((visitor.until for visitor in self._all.values()), default=None)
