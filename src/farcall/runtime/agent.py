"""One worker: runs the protocol over a transport, and user functions in its executor.

Events that no caller waits for are taken from the endpoint by the executor's leader and handled
here (`handle`): outcomes of asynchronous calls, requests, the messages of the reference protocol,
lost links. Calls out are in `call_client` and `call_completion`, calls in are
`server_call.ServerCall`s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from farcall.ids import RefId, UnguessableNumbers, Worker
from farcall.protocol.admission import Bounds
from farcall.protocol.worker import WorkerMachine
from farcall.runtime.calls import intake
from farcall.runtime.calls.answers import Answers
from farcall.runtime.calls.call_client import CallClient, Function, Kwargs
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.cancelling import Cancelling
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.later_calls import To
from farcall.runtime.calls.limits import CallLimits
from farcall.runtime.calls.outboxes import Outboxes
from farcall.runtime.calls.pickling import Pickling
from farcall.runtime.calls.policy import Policy
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.calls.serving import Serving
from farcall.runtime.calls.shortage import Shortage
from farcall.runtime.calls.waiting_requests import WaitingRequests
from farcall.runtime.context import CallContext, set_context
from farcall.runtime.control import ControlMessages
from farcall.runtime.control_routes import ControlRoutes
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory, Find
from farcall.runtime.membership.group import AgentGroup
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.losses import Loss, Losses
from farcall.runtime.membership.members import Members
from farcall.runtime.membership.peers import IncomingCall, Peer, PendingCall
from farcall.runtime.membership.roll_call import Everybody
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.quirks import Quirks
from farcall.runtime.references.handles import References, RefHandle
from farcall.runtime.references.names import Names
from farcall.runtime.references.values import ValueSlot
from farcall.runtime.status import Status
from farcall.runtime.teardown import STOP_SECONDS, Teardown
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.function_queue import max_threads_of
from farcall.runtime.threads.math_functions import prepare_math_functions
from farcall.runtime.threads.openmp import IdleTeam
from farcall.serde import DeviceMap, Serializer
from farcall.transport.base import Arrived, Endpoint, Event, Link
from farcall.transport.loopback import LoopbackLink
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted, Cancel, Failure, Message, Reply, Request
from farcall.wire.messages import Gradients as GradientsMessage

Args = Sequence[Any]


class Agent:
    """One worker of a group. Thread-safe.

    Args:
        me: this worker.
        endpoint: where it listens already; the agent closes it.
        workers: the workers known so far.
        find, everybody: look up one worker that joins later, or all; None for a fixed group.
        rpc_timeout: seconds that a call may take by default; 0 for no limit.
        num_worker_threads: how many functions may run here at once.
        max_threads: how many threads may serve calls at most; None for the default.
        bounds: of the bytes that wait for each worker, and of its requests queued here.
        policy: what other workers may do here.
        dead_host_timeout: seconds; a worker that does not answer for so long while this one shuts
            down is lost. 0: none is.
        limit_openmp_spin: idle OpenMP threads sleep soon while calls are frequent, see `IdleTeam`.
        device_maps: peer's name -> where its tensors of each of our devices go.
        on_close: called once, before anything ends.
        quirks: where it behaves as another system; None: nowhere.
        gradients: makes this agent's distributed autograd.
    """

    def __init__(
        self,
        me: Worker,
        endpoint: Endpoint,
        *,
        workers: Iterable[Worker] = (),
        find: Find | None = None,
        everybody: Everybody | None = None,
        rpc_timeout: float = 60.0,
        num_worker_threads: int = 16,
        max_threads: int | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008  # it is immutable
        policy: Policy | None = None,
        dead_host_timeout: float = 0.0,
        limit_openmp_spin: bool = False,
        device_maps: Mapping[str, DeviceMap] | None = None,
        on_close: Callable[[], None] = lambda: None,
        quirks: Quirks | None = None,
        gradients: Callable[[Agent, Quirks], DistributedGradients],
    ) -> None:
        self.me = me
        quirks = quirks or Quirks()
        self.status = status = Status(me, rpc_timeout, quirks.advice)
        self.endpoint = endpoint
        self.outboxes = Outboxes(me.name)
        self.idle_team = IdleTeam(me.name, enabled=limit_openmp_spin)
        threads = max_threads_of(max_threads, num_worker_threads)
        self.executor = executor = Executor(me.name, endpoint, self, num_worker_threads, threads)
        loopback = LoopbackLink(me, executor.post)
        state: WorkerMachine[PendingCall, IncomingCall] = WorkerMachine(
            me.incarnation, UnguessableNumbers()
        )
        asks = None if find is None else self._find
        self.directory = directory = Directory(
            me, [*workers, me], asks, bounds, state.meet, (policy or Policy()).of
        )
        self.links = links = Links(endpoint, loopback, directory)
        self.losses = losses = Losses(status, endpoint, directory)
        self.control = control = ControlMessages(
            status, endpoint, directory, links, losses, self.outboxes, self._deliver
        )
        self.members = Members(me, find, directory, links, control)
        values: dict[RefId, ValueSlot] = {}
        self.names = Names(me.id, values)
        self.machine = machine = Machine(
            state, values, status, directory, control, executor, endpoint.wake
        )
        self.answers = Answers(status, self.outboxes, executor)
        self.references = references = References(
            self, status, machine, values, directory, executor.collecting, endpoint.wake
        )
        self.serializer = Serializer(
            reference=RefHandle,
            check=references.check_sendable,
            reducers=quirks.reducers,
        )
        self.pickling = Pickling(self.serializer, device_maps or {})
        members = () if find else [(p.worker.id, p.incarnation) for p in directory.live()]
        self.coordinator = coordinator = ShutdownCoordinator(
            me.incarnation, members, control, dead_host_timeout
        )
        self.shortage = shortage = Shortage(status, executor, directory)
        self.limits = limits = CallLimits(status, self.idle_team, quirks.inherits_deadlines)
        self.gradients = gradients(self, quirks)
        self.completion = completion = CallCompletion(
            self,
            status,
            directory,
            losses,
            machine,
            references,
            self.serializer,
            self.gradients,
            executor,
            coordinator,
            limits,
            shortage,
            endpoint.wake,
            quirks.translate,
        )
        self.cancelling = Cancelling(machine, completion)
        self._client = CallClient(
            status,
            directory,
            links,
            machine,
            references,
            completion,
            self.gradients,
            executor,
            coordinator,
            limits,
            self.pickling,
            WaitingRequests(links, self.outboxes, executor, references, completion),
        )
        self._serving = Serving(
            self,
            status,
            machine,
            references,
            self.pickling,
            self.gradients,
            executor,
            coordinator,
            self.answers,
            control,
            shortage,
            quirks.on_raised,
        )
        enter = self.on_thread_start
        self.group = AgentGroup(status, endpoint, directory, links, losses, find, everybody, enter)
        self._routes = ControlRoutes(self.gradients, self.members, coordinator, references)
        self._teardown = Teardown(
            status,
            endpoint,
            directory,
            links,
            losses,
            self.group,
            coordinator,
            machine,
            references,
            self.gradients,
            completion,
            self.outboxes,
            executor,
            self.idle_team,
            shortage,
            on_close,
        )
        losses.start(
            machine.end_calls,
            [
                lambda loss: endpoint.drop(loss.peer.incarnation, loss.cause),
                # Before answers go on: functions that are held must not run.
                Loss.cancel_served,
                lambda loss: self.outboxes.drop(loss.peer.outbox),
                lambda loss: self.outboxes.drop(loss.peer.back_outbox),
                self.answers.on_peer_lost,
                completion.on_peer_lost,
                lambda loss: self.gradients.on_peer_lost(loss.peer),
                references.on_peer_lost,
                lambda loss: coordinator.on_peer_lost(loss.peer.incarnation),
            ],
            machine.discard,
        )
        prepare_math_functions()
        executor.start()

    def __repr__(self) -> str:
        state = "closed" if self.status.is_closed else f"{len(self.directory.live())} live workers"
        return f"<farcall Agent of {self.me.name!r} (id {self.me.id}), {state}>"

    def call(
        self,
        to: To,
        function: Function,
        args: Args = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """Run a function on another worker, or this one, and wait: see `rpc.rpc_sync`.

        `meanwhile` is called when the request was sent, before the wait. It must not raise.
        """
        return self._client.call(to, function, args, kwargs, timeout, meanwhile)

    def call_async(
        self,
        to: To,
        function: Function,
        args: Args = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        maker: FrameType | None = None,
    ) -> Future[Any]:
        """Call as `call` does, but return a future. `maker` is the calling frame, for the log."""
        return self._client.call_async(to, function, args, kwargs, timeout, maker)

    def remote(
        self,
        to: To,
        function: Function,
        args: Args = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        concurrency: int = 0,
    ) -> RefHandle:
        """Run a function elsewhere, and leave its result there: see `rpc.remote`.

        Args:
            concurrency: how many calls of the result's methods run at once; 0: any number.
        """
        return self._client.remote(to, function, args, kwargs, timeout, concurrency)

    def _find(self, key: str | int, deadline: float) -> Worker | None:
        return self.members.find(key, deadline)

    # Events; see `executor.Handler`.

    def on_thread_start(self) -> None:
        set_context(CallContext(self))
        # Asking applies the count to this thread: else OpenMP ignores torch.set_num_threads here.
        torch.get_num_threads()

    def handle(self, event: Event) -> None:
        """Hand an event that the executor's leader took to its part."""
        worker = event.link.peer
        peer = self.directory.of_incarnation(worker.incarnation) or self.directory.heard(worker)
        if peer is None:
            return
        if not isinstance(event, Arrived):
            self.losses.declare_lost(peer, event.cause)
            return
        if peer.loss_cause is not None:
            return
        link, frame = event.link, event.frame
        message = frame.message
        match message:
            case Request():
                self._on_request(peer, link, frame, message)
            case Reply() | Failure() | Accepted():
                self.completion.on_answer(peer, frame)
            case GradientsMessage():
                self.gradients.arrived(peer, frame)
            case Cancel():
                self._on_cancel(peer, link, frame.call_id, message)
            case _:
                self._deliver(peer, message, frame.call_id)

    def _on_request(self, peer: Peer, link: Link, frame: Frame, request: Request) -> None:
        peer.back_link = link
        timeout = request.timeout
        now = time.monotonic()
        if now >= self.idle_team.asks_at:
            self.idle_team.note(now)
        deadline = now + timeout if timeout > 0 else math.inf
        call = ServerCall(self._serving, peer, link, frame, request, deadline)
        with self.machine.lock:
            fresh = peer.incoming.request(frame.call_id, call)
        if not fresh:
            return
        self.coordinator.begin(call)
        call.start()

    def _on_cancel(self, peer: Peer, link: Link, call_id: int, message: Cancel) -> None:
        peer.back_link = link
        cancelled = self.machine.state.cancelled
        call = self.machine.tell(cancelled, peer.incarnation, call_id, waits=message.waits)
        if call is not None:
            self.executor.allow_promotion()
            call.cancel(message.by_user)

    def _deliver(self, peer: Peer, message: Message, call_id: int) -> None:
        self._routes.deliver(peer, message, call_id)

    def before_sleep(self) -> float:
        """Expire due calls, and return when the next is due: the leader has no event."""
        self.references.drain()
        now = time.monotonic()
        for pending in self.completion.deadlines.due(now):
            self.completion.expire(pending)
        return self.completion.deadlines.next

    def on_shortage(self) -> None:
        """Let waiting requests in: the executor has no more threads for calls."""
        intake.let_in(self.directory.live())
        self.shortage.tell()

    # The end.

    def shutdown(self, graceful: bool = True, timeout: float = 0.0) -> None:
        """Leave the group and free everything.

        Args:
            graceful: wait until all live workers of a fixed group have called this and nothing is
                in flight between them (in a group that is not fixed: until nothing is in flight
                here). The dead are not waited for.
            timeout: seconds to wait for that; 0 for no limit.

        Raises:
            RpcTimeout: the others were not ready in time. This agent is shut down nevertheless.
        """
        self._teardown.shutdown(graceful, timeout)

    def close(self, reason: str = "it has shut down", patience: float = STOP_SECONDS) -> None:
        """Leave at once: calls in flight end as Cancelled here and as PeerLost elsewhere.

        The others are told the reason; `patience` is seconds for functions that still run.
        """
        self._teardown.close(reason, patience)

    def close_after_fork(self) -> None:
        """Close, in a child that was forked, what it inherited, and refuse to be used there."""
        self.executor.collecting.close_after_fork(self.me.name)
        self.endpoint.close_after_fork()
