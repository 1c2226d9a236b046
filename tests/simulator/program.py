"""The random program of a simulated schedule: what user code does, one act at a time.

Every act says whether it could be done: a worker without references can't drop one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Protocol, TypeVar

from farcall.ids import meeting_of, original
from simulator.sim_records import Handle
from simulator.sim_worker import SimWorker

T = TypeVar("T")


class Note(Protocol):
    """Writes what happens into the log."""

    def __call__(self, *what: object) -> None: ...


class Program:
    """The program of the workers.

    Args:
        random: draws every choice.
        workers: the live ones, by incarnation; kept up to date by the caller.
        names: of all incarnations that ever were.
        note: writes the log.
    """

    def __init__(
        self,
        random: Random,
        workers: Mapping[int, SimWorker],
        names: Mapping[int, str],
        note: Note,
    ) -> None:
        self._draw = random.random
        self._workers = workers
        self._names = names
        self._note = note
        # Most faults hurt only who uses one value again and again.
        self._values_left = random.choice((1, 2, 3, 20))

    def name(self, peer: int) -> str:
        """Return a worker's name, with a stroke for each time that it was met again."""
        return self._names[original(peer)] + "'" * meeting_of(peer)

    def act(self, worker: SimWorker) -> None:
        """Let this worker do something, if it can."""
        for _ in range(3):
            if self.pick(ACTS)(self, worker):
                return

    def create(self, worker: SimWorker) -> bool:
        """Call `remote()`."""
        peer = self._peer(worker)
        if peer is None or peer == worker.incarnation or not self._another_value():
            return False
        arguments = self._references(worker, peer, False) if self._draw() < 0.4 else []
        is_impatient = self._draw() < 0.2
        how = self.pick(("sent", "waits")) if is_impatient else self._how()
        made = worker.create(peer, self._names[original(peer)], arguments, how)
        self._note(worker.label, "remote()", made, "at", self.name(peer), "with", arguments, how)
        if is_impatient:
            self._lose_interest(worker, arguments)
        return True

    def keep_value(self, worker: SimWorker) -> bool:
        """Own a local value."""
        if not self._another_value():
            return False
        self._note(worker.label, "owns", worker.keep_value())
        return True

    def call(self, worker: SimWorker) -> bool:
        """Call a function, most often with references."""
        peer = self._peer(worker)
        if peer is None:
            return False
        arguments = self._references(worker, peer, False)
        if not arguments and self._draw() < 0.5:
            return False
        how = self._how()
        self._note(worker.label, "calls", self.name(peer), "with", arguments, how)
        worker.call(peer, arguments, how)
        return True

    def call_while_lost(self, worker: SimWorker, peer: int) -> None:
        """Call a function of a peer that another thread declares lost meanwhile."""
        arguments = self._references(worker, peer, False)
        self._note(worker.label, "is calling", self.name(peer), "with", arguments)
        worker.call(peer, arguments, "lost")

    def remind(self, worker: SimWorker, owner: int) -> None:
        """Let others send a worker what they have of an owner that it has just met again."""
        for other in self._workers.values():
            peer = other.now(worker.incarnation)
            handles = [
                one
                for one in other.handles
                if original(one.owner) == owner and other.may_send(one, peer, False)
            ]
            if handles and other is not worker and not other.machine.is_lost(peer):
                arguments = [self.pick(handles)]
                self._note(other.label, "reminds", self.name(peer), "of", arguments)
                other.call(peer, arguments, "sent")

    def _lose_interest(self, worker: SimWorker, arguments: Sequence[Handle]) -> None:
        """Give up on a call, and let go of all that it was given."""
        while self.abandon(worker):
            pass
        for handle in set(arguments):
            self._note(worker.label, "discards all", handle)
            while handle in worker.handles:
                worker.discard(handle)

    def _how(self) -> str:
        """Draw the fate of a request, see `SimWorker.call`."""
        return self.pick(("fails", "waits", "waits")) if self._draw() < 0.1 else "sent"

    def finish(self, worker: SimWorker) -> bool:
        """Let a function end."""
        if not worker.tasks:
            return False
        task = self.pick(worker.tasks)
        results = self._references(worker, task.caller, True) if self._draw() < 0.7 else []
        fails = self._draw() < 0.2
        how = "fails" if fails else "ends"
        self._note(worker.label, how, "call", task.call_id, "of", self.name(task.caller), results)
        worker.finish(task, results, fails)
        if self._draw() < 0.7:  # as its arguments go out of scope
            for handle in task.arguments:
                if handle in worker.handles:
                    self._note(worker.label, "discards argument", handle)
                    worker.discard(handle)
        return True

    def copy(self, worker: SimWorker) -> bool:
        """Copy an `RRef`."""
        if not worker.handles:
            return False
        handle = self.pick(list(worker.handles))
        self._note(worker.label, "copies", handle)
        worker.copy(handle)
        return True

    def discard(self, worker: SimWorker) -> bool:
        """Drop an `RRef`."""
        if not worker.handles:
            return False
        handle = self.pick(list(worker.handles))
        self._note(worker.label, "discards", handle)
        worker.discard(handle)
        return True

    def abandon(self, worker: SimWorker) -> bool:
        """Give up on a call."""
        calls = [(p, c) for p, outgoing in worker.outgoing.items() for c in outgoing.open_ids()]
        if not calls:
            return False
        peer, call_id = self.pick(calls)
        self._note(worker.label, "gives up on call", call_id, "to", self.name(peer))
        worker.abandon(peer, call_id)
        if self._draw() < 0.1:  # two threads give up on it, or the first was late
            worker.abandon(peer, call_id)
        return True

    def ask_to_end(self, worker: SimWorker) -> bool:
        """Cancel a call, and wait for its outcome nevertheless."""
        calls = [(p, c) for p, outgoing in worker.outgoing.items() for c in outgoing.open_ids()]
        if not calls:
            return False
        peer, call_id = self.pick(calls)
        self._note(worker.label, "asks", self.name(peer), "to end call", call_id)
        worker.ask_to_end(peer, call_id)
        return True

    def open_box(self, worker: SimWorker) -> bool:
        """Send what waits for a link."""
        if not worker.boxes:
            return False
        peer = self.pick(list(worker.boxes))
        is_late = self._draw() < 0.3
        self._note(worker.label, "has a link to", self.name(peer), "late:", is_late)
        worker.open_box(peer, is_late)
        return True

    def rebuild(self, worker: SimWorker) -> bool:
        """Take over a message that user code may see."""
        if not worker.rebuildable:
            return False
        key = self.pick(worker.rebuildable)
        self._note(worker.label, "takes over", key)
        worker.rebuild(key)
        return True

    def tick(self, worker: SimWorker) -> bool:
        """Repeat unanswered messages."""
        self._note(worker.label, "ticks")
        worker.tick()
        return True

    def _another_value(self) -> bool:
        """Return whether the program makes one more: rarely, but again when all are gone."""
        if self._values_left <= 0 and any(worker.handles for worker in self._workers.values()):
            return False
        self._values_left -= 1
        return True

    def _peer(self, worker: SimWorker) -> int | None:
        """Draw a worker to call: any that the caller has not forgotten, dead or alive."""
        peers = [i for i in self._names if self._may_call(worker, i) and self._draw() < 0.5]
        return worker.now(self.pick(peers)) if peers else None

    def _may_call(self, worker: SimWorker, peer: int) -> bool:
        if peer in worker.discarded:
            return False
        # A thread may call a peer that another thread is just declaring lost.
        return not worker.machine.is_lost(worker.now(peer)) or self._draw() < 0.1

    def _references(self, worker: SimWorker, peer: int, of_reply: bool) -> list[Handle]:
        handles = [one for one in worker.handles if worker.may_send(one, peer, of_reply)]
        if not handles:
            return []
        if self._draw() < 0.4:  # for these there are rules of their own
            handles = [one for one in handles if one.owner == peer] or handles
        return [self.pick(handles) for _ in range(1 if self._draw() < 0.7 else 2)]

    def pick(self, options: Sequence[T]) -> T:
        """Return one of these, at random."""
        return options[int(self._draw() * len(options))]


Act = Callable[[Program, SimWorker], bool]

ACTS: list[Act] = [
    act
    for weight, act in (
        (5, Program.create),
        (2, Program.keep_value),
        (10, Program.call),
        (10, Program.finish),
        (1, Program.copy),
        (7, Program.discard),
        (3, Program.abandon),
        (3, Program.ask_to_end),
        (2, Program.open_box),
        (3, Program.rebuild),
        (2, Program.tick),
    )
    for _ in range(weight)
]
