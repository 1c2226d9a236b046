"""Shutting down: whether calls are still going on here, and whether all are ready to leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from farcall.protocol.termination import Messages, Silence, TerminationDetector
from farcall.runtime.control import ControlMessages
from farcall.threads import FarcallThread
from farcall.wire.messages import Dismiss, Drain, Drained


def _nothing_else() -> Messages:
    """Return the event of a step that only says whether anything goes on."""
    return []


class ShutdownCoordinator:
    """Counts what goes on in an agent, and helps to find out when all may leave. Thread-safe.

    Args:
        me: this worker's incarnation.
        members: (id, incarnation) of all workers of a fixed group; empty when workers come and go.
        control: sends messages, and sees to it that deaths are noticed.
        bound: seconds; a worker that does not answer for so long while it is waited for counts as
            lost. 0: none does.
    """

    def __init__(
        self,
        me: int,
        members: Sequence[tuple[int, int]],
        control: ControlMessages,
        bound: float = 0.0,
    ) -> None:
        self._lock = threading.Lock()  # guards the detector, the silence, and the asked
        self._me = me
        self._control = control
        self._silence = Silence(bound)
        self._bound = bound
        self._asked: set[int] = set()  # by a thread each, just now
        # Adding and discarding are atomic, so calls take no lock here. Both can also be repeated by
        # a call that Ctrl-C interrupted before the call knew whether it was counted.
        self._going_on: set[object] = set()
        # Grows whenever a call begins, since the user has called shutdown. Without a lock: of two
        # calls that begin at once one may not be counted. But a call is entered above before it
        # reads the number, so the detector answers no worker until it has written the next one.
        # Hence every number that is written after an answer is greater than the answer.
        self._epoch = 0
        self._leaving = False
        self._detector = TerminationDetector(me, list(members)) if members else None
        self._finished = threading.Event()
        self._changed = threading.Event()  # finished, or there may be another leader

    def begin(self, what: object) -> None:
        """Count a call that begins: one of this worker's, or one that it serves."""
        self._going_on.add(what)
        if self._leaving:  # else `leave`, which says so first, looks after us and finds the call
            self._epoch += 1

    @property
    def going_on(self) -> list[object]:
        """The calls that `active` counts."""
        return list(self._going_on)

    def end(self, what: object) -> None:
        """Count a call out that has ended. No effect if that was said before."""
        self._going_on.discard(what)
        if self._leaving and not self._going_on:
            detector = self._detector
            if detector is None:
                self._finish()
            elif detector.asked:  # else it is told when it is asked, which comes after this look
                self._step(detector, _nothing_else)

    def _step(self, detector: TerminationDetector, event: Callable[[], Messages]) -> None:
        """Tell the detector of an event, and after that whether anything goes on."""
        with self._lock:
            detector.busy()
            messages = event()
            # The number is read before the look: a call that begins after the look makes it grow.
            epoch = self._epoch
            if not self._going_on:
                messages += detector.idle(epoch)
            finished = detector.dismissed
        for to, message in messages:
            self._control.post(to, message, 0)
        if finished:
            self._finish()

    def _finish(self) -> None:
        self._finished.set()
        self._changed.set()

    def leave(self, deadline: float) -> bool:
        """Wait until everybody is ready and idle (a group that is not fixed: until this one is).

        Args:
            deadline: `time.monotonic()` seconds.

        Returns:
            False if the deadline passed first.
        """
        self._leaving = True
        detector = self._detector
        if detector is None:
            if not self._going_on:
                self._finish()
        else:
            self._step(detector, detector.ready)
        piece = self._silence.question
        while not self._finished.is_set():
            until = min(deadline, time.monotonic() + piece)
            if detector is not None:
                with self._lock:
                    leader = detector.leader
                self._control.watch(leader, until)
            self._changed.wait(max(0.0, until - time.monotonic()))
            self._changed.clear()
            if time.monotonic() >= deadline:
                break
            if time.monotonic() >= until and self._bound:
                self._ask_all()
        return self._finished.is_set()

    def _ask_all(self) -> None:
        """Ask all that are waited for whether they are there, each in a thread of its own."""
        awaited = {*self.missing, *self._control.awaited()} - {self._me}
        with self._lock:
            asked = awaited - self._asked
            self._asked |= asked
        for peer in asked:
            if FarcallThread(partial(self._ask, peer), "farcall-ask-if-there").try_start():
                with self._lock:
                    self._asked.discard(peer)

    def _ask(self, peer: int) -> None:
        began = time.monotonic()
        answers = self._control.answers(peer, began + self._silence.question)
        with self._lock:
            self._asked.discard(peer)
            is_lost = False
            if answers:
                self._silence.answered(peer)
            elif not self._finished.is_set():
                is_lost = self._silence.unanswered(peer, time.monotonic() - began)
        if is_lost:
            self._control.give_up(
                peer,
                f"its process has not answered for {self._bound:g} s (dead_host_timeout) while "
                "this worker waited for it in shutdown",
            )

    @property
    def missing(self) -> list[int]:
        """Incarnations that are known to be neither ready nor lost; complete at the leader."""
        with self._lock:
            return self._detector.missing if self._detector is not None else []

    @property
    def active(self) -> int:
        """Calls that go on: ours without an outcome, and those that we serve."""
        return len(self._going_on)

    def on_message(self, sender: int, message: Drain | Drained | Dismiss) -> None:
        detector = self._detector
        if detector is None:
            return
        match message:
            case Drain():
                self._step(detector, lambda: detector.on_drain(sender, message))
            case Drained():
                self._step(detector, lambda: detector.on_drained(sender, message))
            case Dismiss():
                with self._lock:
                    detector.on_dismiss(sender)
                    finished = detector.dismissed
                if finished:
                    self._finish()

    def on_peer_lost(self, peer: int) -> None:
        """Wait no longer for a member that died or left."""
        detector = self._detector
        if detector is None:
            return
        self._step(detector, lambda: detector.on_peer_lost(peer))
        self._changed.set()
