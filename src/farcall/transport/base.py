"""The contract of every transport.

An `Endpoint` belongs to one agent. It listens, makes `Link`s to other workers on demand, and hands
out what arrives as events. The rules, which the conformance suite checks on every transport:

- A `Link` belongs to the side that dialled it: it sends requests, the other side answers on the
  same link. Control messages may use a link in either direction.
- Frames sent on one link by one thread arrive in that order, whole, once. A link either works or
  is lost; there is no third state.
- A lost link is reported once, as `LinkLost`, after the last frame that arrived on it.
- `next` and `poll` are called by one thread at a time; everything else by any thread at any time.
- `send` returns when the frame's memory may be reused. It blocks while the peer does not read
  (that is the back-pressure), at most until the deadline.
- A frame that can't be decoded loses its own link and nothing else.
- A link whose reading is switched off (`set_reading`) holds up its sender, as a peer that does not
  read does, and no other link.

Deadlines are `time.monotonic()` values in seconds; `math.inf` means none.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

import msgspec

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.wire.frames import Frame
from farcall.wire.messages import Kind, Message

# Messages that end a call at its caller; everything else on a link is for `Endpoint.next`.
OUTCOMES = frozenset({Kind.REPLY, Kind.FAILURE, Kind.ACCEPTED})


class NotSent(TimeoutError):
    """The deadline passed before the first byte of a frame was written: the peer won't see it."""


class Silent(LinkError):
    """For as long as a host may be silent there was no connection, which proves no death."""


class Means(NamedTuple):
    """The means of an endpoint to reach others, for people.

    Attributes:
        transport: the name of the implementation: "native", "socket", "inproc", ...
        paths: the ways that it may use, best first; empty if the transport has one way only.
        protection: of what goes over a network: "encrypted", "authenticated" or "none".
    """

    transport: str
    paths: tuple[str, ...] = ()
    protection: str = "none"


class Link(Protocol):
    """A two-way connection to one incarnation of a worker."""

    @property
    def peer(self) -> Worker:
        """The worker at the other end, as it said in the handshake."""

    @property
    def description(self) -> str:
        """The path of the link, for people: "tcp 127.0.0.1:4711", "unix from pid 12 (uid 0)"."""

    @property
    def drawback(self) -> str:
        """The reason for this path and not a better one, or "": this side can't tell."""

    def send(self, frame: Frame, deadline: float) -> None:
        """Write a frame.

        Raises:
            NotSent: the deadline passed before anything was written.
            TimeoutError: the deadline passed in the middle. The peer gets the frame nevertheless.
            LinkError: the link is lost.
            SerializationError: the frame is larger than a peer takes. Nothing was written, and the
                link goes on.
        """

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        """Write a request and wait for the outcome with the same call id.

        The waiting thread receives its own reply where the transport can do that.

        Args:
            meanwhile: called when the request was sent, before the wait.

        Raises:
            NotSent: the deadline passed before anything was written.
            TimeoutError: the deadline passed later.
            LinkError: the link is lost.
            SerializationError: as for `send`.
        """

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> Frame | None:
        """Receive in this thread, until a message of one of these types arrives.

        It is taken out of the order of the link's other messages, which go to `Endpoint.next`.

        Args:
            alarm: a file descriptor; when it can be read, the wait ends.

        Returns:
            None if the alarm went off, the deadline passed, the link was lost, another thread
            receives, or the transport can't do this. Any other frame is left for `Endpoint.next`.
        """

    def set_reading(self, is_on: bool) -> None:
        """Say whether frames of this link are taken for `Endpoint.next` from now on.

        Off: a few frames that were received before may still arrive, and what an `exchange` or a
        `receive` waits for does. If the peer closes the connection the endpoint switches reading on
        again, so that the loss is reported after the last frame. Over TCP that may be noticed only
        when the kernel's buffers have room for the peer's last bytes, and without epoll only when
        reading is switched on. No effect on a lost link. Never waits; one thread at a time for each
        link.
        """


class Arrived(msgspec.Struct, frozen=True):
    """A frame arrived that no `exchange` waits for."""

    link: Link
    frame: Frame


class LinkLost(msgspec.Struct, frozen=True):
    """A link ended: the peer died, left, misbehaved, or was dropped."""

    link: Link
    cause: str


Event = Arrived | LinkLost


class Notice(IntEnum):
    """The result of `Watch.wait`."""

    STOPPED = 0
    OVERDUE = 1
    STARVING = 2


class Watch(Protocol):
    """Notices when a thread is busy for more than a millisecond, or does not get on at all.

    One is watched and one thread watches; all methods but `wait` may be called by any thread.
    """

    def begin(self) -> None:
        """Note that the watched thread begins long work. No effect if it has begun already."""

    def end(self) -> None:
        """Note that the long work is over."""

    def is_overdue(self) -> bool:
        """Return whether it began more than a millisecond ago, and is not over."""

    def set_queue(self, is_there: bool) -> None:
        """Set whether something waits for the watched one, or for others like it."""

    def wait(self) -> int:
        """Wait until a busy thread is overdue, or a queue has stood still for some time.

        Returns a `Notice`. Where nothing happens, waiting costs nothing.
        """

    def stop(self) -> None:
        """`wait` returns STOPPED, now and later."""


class Endpoint(Protocol):
    """One agent's place on a network."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """URLs where others reach this endpoint, best first."""

    @property
    def means(self) -> Means:
        """The means of this endpoint to reach others."""

    def connect(self, worker: Worker, deadline: float) -> Link:
        """Return the link that this side dialled to a worker; dials it on first use.

        Raises:
            LinkError: it can't be reached, or refused us, or is there and had given us up.
            NotSent: it does not answer by the deadline.
        """

    def linked(self, worker: Worker) -> Link | None:
        """Return the link that this side dialled to a worker, if there is one. Never waits."""

    def answers(self, worker: Worker, deadline: float) -> bool:
        """Return whether a worker's process says by the deadline that it is there; wait for that.

        It says so by itself, whatever its functions do, unless it is stopped, its GIL is held, or
        its host is dark. Return True where that can't be asked.
        """

    def is_gone(self, worker: Worker, deadline: float) -> bool:
        """Return whether a worker is no longer where it listened: another may have its name.

        When in doubt it is there. Blocks the calling thread.

        Args:
            deadline: on `time.monotonic()`, in seconds; ends the search.
        """

    def next(self, timeout: float | None) -> Event | None:
        """Return the next event, or None: after `timeout` seconds, a `wake`, or for no reason.

        One thread at a time.
        """

    def poll(self) -> Event | None:
        """Return the next event, if it is here and needs no blocking; else None: see `next`.

        One thread at a time, the one that calls `next`.
        """

    def new_watch(self) -> Watch:
        """Return a watch for the threads that serve this endpoint."""

    def wake(self) -> None:
        """Make a running or the next `next` return. Cheap; callable from a finalizer."""

    def links(self) -> list[Link]:
        """Return every link that is not lost."""

    def drop(self, peer: int, cause: str) -> None:
        """End all links with an incarnation. Each is reported as lost."""

    def close(self) -> None:
        """End all links without reporting them, stop listening, free everything."""

    def close_after_fork(self) -> None:
        """Give up, in a child that was forked, what it inherited, without a word to the peers.

        Else the child's copies of the descriptors would hide the parent's death from them.
        """


Admit = Callable[[str, int, int], str | None]
"""Asked for (name, original incarnation, number of the meeting) of everyone who dials in, and of
whom we dial if it wants another meeting than we do: a reason to refuse, or None. Then whatever was
of earlier meetings with it has ended here (see `farcall.ids`). It may take its time.
"""

Meeting = Callable[[int], int]
"""For an original incarnation: which meeting with it is the present or, if it is lost, the next."""
