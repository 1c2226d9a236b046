"""What travels between a worker and somebody who asks about it."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_QUESTION = 1 << 10  # bytes
MAX_REPORT = 64 << 20


class Question(msgspec.Struct, array_like=True, frozen=True):
    """What to tell. `stacks`: also of each thread where it is."""

    stacks: bool = False


class CallReport(msgspec.Struct, frozen=True):
    """A call that has no outcome yet.

    Attributes:
        function: what the caller asked for.
        worker: the other side: the callee of a call made here, the caller of one served here.
        call_id: its number between the two.
        seconds: since it was made, or has arrived; None: it has no limit, so that is not known.
        limit: seconds that it may take; 0: no limit.
        state: "flies" or "waits to be sent", of one made here; "runs", "is queued", for a
            thread or its references, or "waits for its future", of one served here.
    """

    function: str
    worker: str
    call_id: int
    seconds: float | None
    limit: float
    state: str


class ThreadReport(msgspec.Struct, frozen=True):
    """A thread of Python.

    Attributes:
        name: as Python knows it.
        id: as the system knows it; 0: unknown.
        frames: 'file, line N, in function: source', the innermost first; without farcall's own if
            there are others.
        place: the innermost of them that is the user's own, or of all.
        serves: the call that it runs the function of.
        waits_for: the call whose outcome it waits for.
    """

    name: str
    id: int
    frames: list[str]
    place: str
    serves: CallReport | None
    waits_for: CallReport | None


class MemberReport(msgspec.Struct, frozen=True):
    """Another worker, as this one knows it.

    Attributes:
        path: by which way calls go there, or "": there were none.
        in_flight: calls made to it that have no outcome.
        unsent: bytes that wait until it reads.
        is_read: whether its requests are read; they are not while too many are queued.
        lost: why it is lost, or "".
        arrived: how many calls of it have arrived here; 0 if it is lost.
    """

    name: str
    id: int
    incarnation: int
    host: str
    pid: int
    addresses: tuple[str, ...]
    path: str
    in_flight: int
    unsent: int
    is_read: bool
    lost: str
    arrived: int = 0


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker, as it sees itself.

    Attributes:
        age: seconds since it began.
        memory: bytes, resident.
        descriptors: how many are open, and how many may be.
        role: as its options say, or "".
        world_size: of its group; 0: workers come and go.
        state: "works", "starts" (it waits for others of its group) or "leaves" (in `shutdown`).
        waits_for: in `shutdown`: names of the workers that it waits for, as far as it knows.
        calls: made here, without an outcome.
        served: calls of others, and of its own to itself, that are served here.
        running: how many functions run, those that wait for farcall not counted.
        max_running: how many may.
        shortage: why functions are held back for want of threads, or "".
        references: sizes of the tables of references.
        threads: empty if that was not asked for.
    """

    name: str
    id: int
    incarnation: int
    host: str
    pid: int
    versions: str
    age: float
    memory: int
    descriptors: tuple[int, int]
    role: str = ""
    world_size: int = 0
    state: Literal["starts", "works", "leaves"] = "starts"
    waits_for: list[str] = []
    members: list[MemberReport] = []
    calls: list[CallReport] = []
    served: list[CallReport] = []
    running: int = 0
    max_running: int = 0
    shortage: str = ""
    references: dict[str, int] = {}
    threads: list[ThreadReport] = []
