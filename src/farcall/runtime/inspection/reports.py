"""The messages between a worker and a process that asks about it."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_QUESTION = 1 << 10  # bytes
MAX_REPORT = 16 << 20
ARRIVAL = "barrier, gather or all_gather"  # how messages name the calls by which these are made


class Question(msgspec.Struct, array_like=True, frozen=True):
    """The parts that a report is to have.

    Attributes:
        stacks: also of each thread where it is.
        measures: measure the way to the worker of this name, and tell of that one alone.
    """

    stacks: bool = False
    measures: str = ""


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


class WaitReport(msgspec.Struct, frozen=True):
    """A wait of a thread other than for a call: `what` in words, and since how many `seconds`."""

    what: str
    seconds: float


class LoopReport(msgspec.Struct, frozen=True):
    """An event loop of asyncio that is in the middle of a coroutine or of a callback.

    Attributes:
        place: where the coroutine or the callback is, in the form of `ThreadReport.place`.
        seconds: since the loop has last looked for events.
        ready: how many coroutines and callbacks go on as soon as the loop does. Those whose socket
            has data are not among them: the loop alone could tell.
    """

    place: str
    seconds: float
    ready: int


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
        awaits: what else it waits for: the store, or workers that have yet to join.
        loop: the event loop that it runs, unless that looks for events.
    """

    name: str
    id: int
    frames: list[str]
    place: str
    serves: CallReport | None
    waits_for: CallReport | None
    awaits: WaitReport | None = None
    loop: LoopReport | None = None


class MemberReport(msgspec.Struct, frozen=True):
    """Another worker, as this one knows it, and the path there. `str` gives it in words.

    Attributes:
        name, id, host, pid: of the worker.
        incarnation: of its present life; it has another one after a restart, or if it was met
            again.
        addresses: where it listens.
        path: the path of calls: "shm", "unix", "tcp" or another transport's word, and the address;
            "" if there were no calls.
        in_flight: calls made to it that have no outcome.
        unsent: bytes that wait until it reads.
        is_read: whether this worker reads its requests; it does not while too many are queued.
        loss_cause: why it is lost, or "".
        drawback: why calls take no better path, or "" if there is none.
        protection: of the bytes sent there: "encrypted", "authenticated" or "none"; "local" if they
            don't leave the host, and no other user can reach them; "" if there were no calls.
        losses: how many times it was lost, and met again.
        received: how many calls it has made here so far.
        latency: seconds from a call that does nothing to its answer, the median of some; None if it
            was not measured.
        bandwidth: bytes in a second at which tensors go there; None if it was not measured.
        unreached: why it could not be reached, or measured, when that was asked for; or "".
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
    loss_cause: str
    drawback: str = ""
    protection: str = ""
    losses: int = 0
    received: int = 0
    latency: float | None = None
    bandwidth: float | None = None
    unreached: str = ""

    def __str__(self) -> str:
        place = f"{self.name} (id {self.id}, pid {self.pid} on {self.host})"
        if self.loss_cause:
            return f"{place} is lost: {self.loss_cause}"
        said = [f"{place}: {self.path or 'there is no link'}"]
        said += [PROTECTIONS[self.protection]] if self.protection else []
        lines = [", ".join(said)]
        lines += [f"no better path: {self.drawback}"] if self.drawback else []
        if self.latency is not None:
            speed = "" if self.bandwidth is None else f", {rate(self.bandwidth)}"
            lines.append(f"measured: {self.latency * 1e6:.0f} us a call{speed}")
        lines += [f"it was not reached: {self.unreached}"] if self.unreached else []
        lines.append(
            f"{self.in_flight} calls in flight, {self.unsent} bytes wait; it has made "
            f"{self.received} calls here; incarnation {self.incarnation:x}, lost and met again "
            f"{self.losses} times"
        )
        lines += [] if self.is_read else ["its requests are not read: too many are queued here"]
        return "\n  ".join(lines)


PROTECTIONS = {
    "encrypted": "encrypted",
    "authenticated": "authenticated and not encrypted (encrypt=False)",
    "none": "neither encrypted nor authenticated",
    "local": "within this host and user",
}


def rate(bandwidth: float) -> str:
    """Return a number of bytes in a second in words."""
    return f"{bandwidth / 1e9:.1f} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.0f} MB/s"


class GatheringReport(msgspec.Struct, frozen=True):
    """A `barrier`, `gather` or `all_gather` that this worker leads, and that is not complete.

    Attributes:
        what: which of these.
        seconds: since the first worker has called it.
        come: names of the workers that have.
        missing: names of those that have not.
    """

    what: str
    seconds: float
    come: list[str]
    missing: list[str]


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
        received: how many calls have come here so far, those that are served now included.
        gatherings: those that this worker leads.
        clock: `time.time()` there.
        transport: the name of its transport.
        paths: the ways to others that it may use, best first.
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
    received: int = 0
    gatherings: list[GatheringReport] = []
    clock: float = 0.0
    transport: str = ""
    paths: tuple[str, ...] = ()
    references: dict[str, int] = {}
    threads: list[ThreadReport] = []
