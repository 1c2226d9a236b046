"""Answers that their caller does not take at once: they wait in its box, and no thread with them.

While too much waits for a caller, its functions don't begin (`farcall.protocol.admission`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farcall.errors import LinkError
from farcall.runtime.calls.outboxes import AT_ONCE, detached, end_of_grace, size_of
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import NotSent
from farcall.transport.uninterrupted import uninterrupted
from farcall.wire.frames import Frame, check_size
from farcall.wire.messages import encode_message

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent
    from farcall.runtime.calls.inbound import Job

AT_ONCE_SIZE = 4096  # bytes


class Answers:
    """Sends what an agent answers. Thread-safe.

    Args:
        agent: whose answers these are.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def send(self, job: Job, frame: Frame) -> bool | None:
        """Send an answer, or leave it to the box of its caller: then `Job.left` hears how it ends.

        Returns:
            None if it was left; False if the caller won't get it, for it is gone.

        Raises:
            SerializationError: the frame is larger than a peer takes.
        """
        if job.peer.back_outbox.is_idle:
            # Without a look at the clock, most often.
            is_small = not frame.buffers and len(frame.body) <= AT_ONCE_SIZE
            try:
                try:
                    job.link.send(frame, AT_ONCE if is_small else end_of_grace(frame, job.deadline))
                except NotSent:
                    if not is_small:
                        raise
                    job.link.send(frame, end_of_grace(frame, job.deadline))
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
        waiting = _WaitingAnswer(self, job, detached(frame))
        # Whoever completes a future answers, the main thread of a program too.
        uninterrupted(
            lambda: self._leave(job.peer, waiting), f"farcall-answer-{self._agent.me.name}"
        )
        return None

    def _leave(self, peer: Peer, waiting: _WaitingAnswer) -> None:
        with peer.lock:
            peer.admission.waits(waiting.size)
        self._agent.outboxes.put_at_once(peer.back_outbox, waiting)

    def went(self, job: Job, size: int, *, is_sent: bool) -> None:
        """An answer that was left is sent, or never will be."""
        peer = job.peer
        with peer.lock:
            held = peer.admission.went(size)
        self._begin(held)
        job.left(is_sent=is_sent)

    def lost(self, peer: Peer) -> None:
        """A caller is gone: functions that were held find that out."""
        with peer.lock:
            held = peer.admission.lost()
        self._begin(held)

    def _begin(self, held: list[Job]) -> None:
        if not self._agent.is_closed:
            for job in held:
                self._agent.executor.submit(job.run_queued, job.request.depth, job.peer)


class _WaitingAnswer:
    """One answer. See `outboxes.Waiting`."""

    __slots__ = ("_answers", "_frame", "_job", "size")

    def __init__(self, answers: Answers, job: Job, frame: Frame) -> None:
        self._answers = answers
        self._job = job
        self._frame = frame
        self.size = size_of(frame)

    @property
    def is_over(self) -> bool:
        return self._job.peer.lost is not None or time.monotonic() > self._job.deadline

    def send(self) -> None:
        is_sent = False
        try:
            if not self.is_over:
                self._job.link.send(self._frame, self._job.deadline)
                is_sent = True
        except (LinkError, NotSent):
            pass
        except TimeoutError:
            is_sent = True  # the rest follows when the caller reads again
        finally:
            self._answers.went(self._job, self.size, is_sent=is_sent)

    def drop(self) -> None:
        self._answers.went(self._job, self.size, is_sent=False)
