"""Answers that their caller does not take at once: they wait in its outbox, without a thread.

While too much waits for a caller, its functions don't begin (`farcall.protocol.admission`).
"""

from __future__ import annotations

import time

from farcall.errors import LinkError
from farcall.runtime.calls.outboxes import AT_ONCE, Outboxes, detached, end_of_grace, size_of
from farcall.runtime.membership.losses import Loss
from farcall.runtime.membership.peers import AnsweredCall, IncomingCall, Peer
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.transport.base import NotSent
from farcall.transport.uninterrupted import uninterrupted
from farcall.wire.frames import Frame, check_size
from farcall.wire.messages import encode_message

AT_ONCE_SIZE = 4096  # bytes


class Answers:
    """Sends what an agent answers. Thread-safe."""

    def __init__(self, status: Status, outboxes: Outboxes, executor: Executor) -> None:
        self._status = status
        self._outboxes = outboxes
        self._executor = executor

    def send(self, call: AnsweredCall, frame: Frame) -> bool | None:
        """Send an answer, or leave it to the box of its caller.

        If it is left, `AnsweredCall.left` hears how it ends.

        Returns:
            None if it was left; False if the caller won't get it, for it is gone.

        Raises:
            SerializationError: the frame is larger than a peer takes.
        """
        if call.peer.back_outbox.is_idle:
            # Without a look at the clock, most often.
            is_small = not frame.buffers and len(frame.body) <= AT_ONCE_SIZE
            try:
                try:
                    call.link.send(
                        frame, AT_ONCE if is_small else end_of_grace(frame, call.deadline)
                    )
                except NotSent:
                    if not is_small:
                        raise
                    call.link.send(frame, end_of_grace(frame, call.deadline))
                return True
            except NotSent:
                pass
            except LinkError:
                return False
            except TimeoutError:
                return True  # the rest of the frame follows when the caller reads again
        check_size(
            frame.message, len(encode_message(frame.message)), len(frame.body), frame.buffers
        )
        waiting = _WaitingAnswer(self, call, detached(frame))
        # The thread that completes a future answers, the main thread of a program too.
        uninterrupted(
            lambda: self._leave(call.peer, waiting), f"farcall-answer-{self._status.me.name}"
        )
        return None

    def _leave(self, peer: Peer, waiting: _WaitingAnswer) -> None:
        with peer.lock:
            peer.admission.waits(waiting.size)
        self._outboxes.put_at_once(peer.back_outbox, waiting)

    def went(self, call: AnsweredCall, size: int, *, is_sent: bool) -> None:
        """End a call whose answer was left: it is sent, or never will be."""
        peer = call.peer
        with peer.lock:
            held = peer.admission.went(size)
        self._begin(held)
        call.left(is_sent=is_sent)

    def on_peer_lost(self, loss: Loss) -> None:
        """Run the calls that a lost caller held up: they find out that it is gone."""
        with loss.peer.lock:
            held = loss.peer.admission.take_all()
        self._begin(held)

    def _begin(self, held: list[IncomingCall]) -> None:
        if not self._status.is_closed:
            for call in held:
                self._executor.submit(call.run_queued, call.request.depth, call.peer)


class _WaitingAnswer:
    """One answer. See `outboxes.Waiting`."""

    __slots__ = ("_answers", "_call", "_frame", "size")

    def __init__(self, answers: Answers, call: AnsweredCall, frame: Frame) -> None:
        self._answers = answers
        self._call = call
        self._frame = frame
        self.size = size_of(frame)

    @property
    def is_over(self) -> bool:
        return self._call.peer.loss_cause is not None or time.monotonic() > self._call.deadline

    def send(self) -> None:
        is_sent = False
        try:
            if not self.is_over:
                self._call.link.send(self._frame, self._call.deadline)
                is_sent = True
        except (LinkError, NotSent):
            pass
        except TimeoutError:
            is_sent = True  # the rest follows when the caller reads again
        finally:
            self._answers.went(self._call, self.size, is_sent=is_sent)

    def drop(self) -> None:
        self._answers.went(self._call, self.size, is_sent=False)
