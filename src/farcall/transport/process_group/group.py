"""A process group as its transport sees it: messages between ranks, by rank and tag.

Buffers in the memory of devices go beside it, by device channels.

The runtime provides it (`runtime/process_groups/opening.py`, over torch.distributed): nothing here
knows what carries the bytes.
"""

from __future__ import annotations

from typing import Protocol

from farcall.wire.messages import Buffer, OnDevice


class Operation(Protocol):
    """A message on its way in or out; its memory must stay as it is until `wait` has returned."""

    def wait(self) -> None:
        """Wait until the operation is through. One thread at a time may wait.

        Raises:
            LinkError: it can't be any more: the other rank is gone, or the group was closed.
        """


class RankGroup(Protocol):
    """One rank's place in a group of fixed size. All methods may be called by any thread.

    Messages of one tag between two ranks arrive in the order in which they were sent. A message may
    be shorter than the memory that it is received into.
    """

    scheme: str
    """The beginning of its addresses: "gloo"."""

    notices_ends: bool
    """Whether operations with a rank that has gone fail; if not, a leaving rank has to say so."""

    rank: int
    size: int

    def send(self, to: int, tag: int, memory: Buffer) -> Operation:
        """Begin to send a message of at least one byte. Does not wait for the receiver.

        Raises:
            LinkError: that rank is gone.
        """

    def receive(self, source: int, tag: int, memory: Buffer) -> Operation:
        """Begin to receive the next message of a rank and tag into writable memory.

        Raises:
            LinkError: that rank is gone.
        """

    def close(self) -> None:
        """End every operation that is under way, and all connections."""

    def free(self) -> None:
        """Give back its resources. After `close`, when no thread waits any more."""


class DeviceChannels(Protocol):
    """Ways to the other ranks for the memory of devices. All methods may be called by any thread.

    The receives from a rank take what it sends in order, so both ranks begin them in one order.
    """

    def send(self, to: int, buffer: OnDevice) -> Operation:
        """Begin to send. May wait until the receiver begins, too.

        Raises:
            LinkError: the channel was abandoned, or can't be had.
        """

    def receive(self, source: int, size: int) -> tuple[OnDevice, Operation]:
        """Begin to receive the next buffer, of `size` bytes. May wait until the sender begins, too.

        Raises:
            LinkError: the channel was abandoned, or can't be had.
        """

    def abandon(self, rank: int) -> None:
        """End operations to and from a rank; nothing can be begun any more."""

    def close(self) -> None:
        """Abandon all, and give back what they have of the system."""
