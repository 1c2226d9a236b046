"""Frames between agents of one process, through queues: for tests, and for several agents at once.

Buffers are copied on the way, so that two workers never share memory by accident: a test that
passes here must not fail between processes because a tensor turned out to be the same one.
"""

from __future__ import annotations

import queue
import threading

import msgspec

from farcall.errors import LinkError
from farcall.ids import Worker, nth_incarnation
from farcall.transport.base import (
    OUTCOMES,
    Admit,
    Arrived,
    Event,
    Link,
    LinkLost,
    Means,
    Meeting,
)
from farcall.transport.connect.handshake_messages import Unwanted
from farcall.transport.connect.listening import admit_all, first_meeting
from farcall.transport.dispatched_link import DispatchedLink, Gate
from farcall.transport.waiter import Waiter
from farcall.transport.watch import PollingWatch
from farcall.wire.frames import Frame
from farcall.wire.messages import KINDS


class InprocNetwork:
    """The network in which the endpoints of one process find each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[str, InprocEndpoint] = {}

    def add(self, address: str, endpoint: InprocEndpoint) -> None:
        with self._lock:
            if address in self._endpoints:
                raise LinkError(f"{address} is already in use")
            self._endpoints[address] = endpoint

    def remove(self, address: str) -> None:
        with self._lock:
            self._endpoints.pop(address, None)

    def find(self, address: str) -> InprocEndpoint | None:
        with self._lock:
            return self._endpoints.get(address)


class InprocLink(DispatchedLink):
    """One end of a link; `other` is the other end."""

    def __init__(self, home: InprocEndpoint, peer: Worker, description: str) -> None:
        super().__init__()
        self.home = home
        self.peer = peer
        self.description = description
        self.other: InprocLink
        self.loss_cause: str | None = None
        self.gate = Gate()  # of what the other end sends

    def set_reading(self, is_on: bool) -> None:
        self.gate.set_open(is_on)
        if self.loss_cause is not None:
            self.gate.set_open(True)

    def send(self, frame: Frame, deadline: float) -> None:
        self.other.gate.pass_by(deadline)
        if self.loss_cause is not None:
            raise LinkError(self.loss_cause)
        copies = [bytearray(buffer) for buffer in frame.buffers]
        self.other.home.receive(self.other, Frame(frame.message, frame.call_id, frame.body, copies))

    def expect(self, call_id: int, waiter: Waiter[Frame]) -> None:
        self.home.watch(self, call_id, waiter)


class InprocEndpoint:
    """See `base.Endpoint`."""

    means = Means("inproc")

    def __init__(
        self,
        network: InprocNetwork,
        me: Worker,
        admit: Admit = admit_all,
        meeting: Meeting = first_meeting,
    ) -> None:
        self._network = network
        self.me = me
        self._admit = admit
        self._meeting = meeting
        self._address = f"inproc://{me.name}/{me.incarnation:x}"
        self._lock = threading.Lock()  # guards the links and their waiters
        # SimpleQueue.put may be called from a finalizer; a Condition's methods may not.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._links: list[InprocLink] = []
        self._dialled: dict[int, InprocLink] = {}
        self._closed = False
        network.add(self._address, self)

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    def linked(self, worker: Worker) -> InprocLink | None:
        link = self._dialled.get(worker.incarnation)
        return link if link is not None and link.loss_cause is None else None

    def answers(self, worker: Worker, deadline: float) -> bool:
        return True

    def is_gone(self, worker: Worker, deadline: float) -> bool:
        return not any(map(self._network.find, worker.addresses))

    def connect(self, worker: Worker, deadline: float) -> InprocLink:
        link = self._dialled.get(worker.incarnation)
        if link is not None and link.loss_cause is None:
            return link
        other = next(filter(None, map(self._network.find, worker.addresses)), None)
        if other is None:
            raise LinkError(f"worker {worker.name!r} is not listening on {worker.addresses}")
        me, they = self.me, other.me
        meeting = max(self._meeting(they.incarnation), other._meeting(me.incarnation))
        reason = other._admit(me.name, me.incarnation, meeting)
        if reason is None and meeting:
            reason = self._admit(they.name, they.incarnation, meeting)
        if reason is not None:
            raise Unwanted(f"worker {worker.name!r} refused: {reason}")
        link = self._dial(other, meeting)
        if link.peer.incarnation != worker.incarnation:
            raise LinkError(f"worker {worker.name!r} had given this one up; both begin anew")
        return link

    def _dial(self, other: InprocEndpoint, meeting: int) -> InprocLink:
        they, me = _as_met(other.me, meeting), _as_met(self.me, meeting)
        with self._lock:
            known = self._dialled.get(they.incarnation)
            if known is not None and known.loss_cause is None:
                return known
            if self._closed:
                raise LinkError("this worker has shut down")
            near = InprocLink(self, they, f"inproc to {they.name}")
            far = InprocLink(other, me, f"inproc from {me.name}")
            near.other, far.other = far, near
            self._dialled[they.incarnation] = near
            self._links.append(near)
        other.attach(far)
        return near

    def attach(self, link: InprocLink) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._links.append(link)
        if closed:
            link.other.home.fail(link.other, "the peer has closed")

    def watch(self, link: InprocLink, call_id: int, waiter: Waiter[Frame]) -> None:
        with self._lock:
            if link.loss_cause is not None:
                raise LinkError(link.loss_cause)
            link.waiters[call_id] = waiter

    def receive(self, link: InprocLink, frame: Frame) -> None:
        with self._lock:
            if link.loss_cause is not None:
                return
            waiter = None
            if KINDS[type(frame.message)] in OUTCOMES:
                waiter = link.waiters.pop(frame.call_id, None)
            if waiter is None:
                self._events.put(Arrived(link, frame))
                return
        waiter.deliver(frame)

    def fail(self, link: InprocLink, cause: str) -> None:
        with self._lock:
            if link.loss_cause is not None:
                return
            link.loss_cause = cause
            link.gate.set_open(True)
            waiters = link.take_waiters()
            if link in self._links:
                self._links.remove(link)
            if not self._closed:
                self._events.put(LinkLost(link, cause))
        for waiter in waiters:
            waiter.fail(cause)

    def next(self, timeout: float | None) -> Event | None:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def poll(self) -> Event | None:
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def new_watch(self) -> PollingWatch:
        return PollingWatch()

    def wake(self) -> None:
        self._events.put(None)

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def drop(self, peer: int, cause: str) -> None:
        for link in [link for link in list(self._links) if link.peer.incarnation == peer]:
            self.fail(link, cause)
            link.other.home.fail(link.other, cause)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links)
        self._events.put(None)
        self._network.remove(self._address)
        for link in links:
            self.fail(link, "this worker has shut down")
            link.other.home.fail(link.other, "the peer has closed its end")

    def close_after_fork(self) -> None:
        self._closed = True


def _as_met(worker: Worker, meeting: int) -> Worker:
    return msgspec.structs.replace(worker, incarnation=nth_incarnation(worker.incarnation, meeting))
