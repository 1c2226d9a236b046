"""The end of an agent: its parts are ended in an order in which none waits for one that has ended.

A call that is open when the agent ends must be `Cancelled` here, and `PeerLost` with the reason
elsewhere. So peers are marked as lost before their links go, all that threads of ours may wait for
ends before the threads, and the endpoint ends after both.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from farcall.errors import LinkError, RpcTimeout
from farcall.log import get_logger, records_later
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.outboxes import Outboxes
from farcall.runtime.calls.shortage import Shortage
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.group import AgentGroup
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.peers import PendingCall
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.openmp import IdleTeam
from farcall.transport.base import Endpoint
from farcall.transport.uninterrupted import uninterrupted
from farcall.wire.frames import Frame
from farcall.wire.messages import Leaving

logger = get_logger("farcall")

GOODBYE_SECONDS = 0.2
STOP_SECONDS = 5.0


class Teardown:
    """Ends an agent: once, however often and by however many threads it is asked.

    Args:
        on_close: called once, before anything ends.
    """

    def __init__(
        self,
        status: Status,
        endpoint: Endpoint,
        directory: Directory,
        links: Links,
        losses: Losses,
        group: AgentGroup,
        coordinator: ShutdownCoordinator,
        machine: Machine,
        references: References,
        gradients: DistributedGradients,
        completion: CallCompletion,
        outboxes: Outboxes,
        executor: Executor,
        idle_team: IdleTeam,
        shortage: Shortage,
        on_close: Callable[[], None],
    ) -> None:
        self._status = status
        self._endpoint = endpoint
        self._directory = directory
        self._links = links
        self._losses = losses
        self._group = group
        self._coordinator = coordinator
        self._machine = machine
        self._references = references
        self._gradients = gradients
        self._completion = completion
        self._outboxes = outboxes
        self._executor = executor
        self._idle_team = idle_team
        self._shortage = shortage
        self._closing = threading.Lock()
        self._on_close = on_close

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """End the agent as `Agent.shutdown` says."""
        self._executor.collecting.refuse("shutdown")
        try:
            if graceful and not self._status.is_closed:
                self._status.is_leaving = True
                self._leave(time.monotonic() + timeout if timeout else math.inf, timeout)
        finally:
            self.close()

    def _leave(self, deadline: float, timeout: float) -> None:
        if self._coordinator.leave(deadline):
            self._outboxes.flush(time.monotonic() + GOODBYE_SECONDS)
            return
        missing = [self._directory.of_incarnation(inc) for inc in self._coordinator.missing]
        names = ", ".join(repr(peer.name) for peer in missing if peer is not None)
        active = self._coordinator.active
        what = f"{active} calls are in flight here" if active else f"waiting for {names}"
        raise RpcTimeout(
            f"graceful shutdown of {self._status.me.name!r} took longer than {timeout} s: {what}"
            f"{self._shortage.describe()}"
        )

    def close(self, reason: str = "it has shut down", patience: float = STOP_SECONDS) -> None:
        """End the agent as `Agent.close` says."""
        if not self._status.is_closed:
            # All of it or nothing: what Ctrl-C left undone would never be done.
            name = f"farcall-end-{self._status.me.name}"
            uninterrupted(lambda: self._close(reason, patience), name)

    @records_later()
    def _close(self, reason: str, patience: float) -> None:
        with self._closing:
            if self._status.is_closed:
                return
            try:
                # First: others take one that they can't reach for dead, unless the store says else.
                self._on_close()
            finally:
                self._status.is_closed = True
        self._losses.close()
        self._group.close()
        try:
            self._end_calls(reason)
        finally:
            try:
                self._idle_team.close(time.monotonic() + patience)
                if not self._executor.stop(patience):
                    logger.warning(
                        "%s: shut down while functions are still running", self._status.me.name
                    )
            finally:
                self._completion.fail_queued(self._status.closed_error())
                self._endpoint.close()
                self._outboxes.close(patience)

    def _end_calls(self, reason: str) -> None:
        error = self._status.closed_error()
        cancelled: list[PendingCall] = []
        for peer in self._directory.all():
            # Before anything ends: the ends of links must not be taken for the deaths of peers.
            with peer.lock:
                peer.loss_cause = peer.loss_cause or str(error)
            peer.loss_told.set()
            cancelled += peer.outgoing.take_all()
            self._outboxes.drop(peer.outbox)
            self._outboxes.drop(peer.back_outbox)
        try:
            until = time.monotonic() + GOODBYE_SECONDS  # for all: many may not read
            for link in self._endpoint.links():
                with contextlib.suppress(LinkError, TimeoutError):
                    link.send(Frame(Leaving(reason)), until)
        finally:
            # First everything that threads of ours may wait for, then the threads.
            self._links.loopback.fail(str(error))
            for peer in self._directory.all():
                self._endpoint.drop(peer.incarnation, str(error))
            self._completion.fail(cancelled, error)
            self._gradients.close()
            self._references.close(error)
            self._machine.close(error)
