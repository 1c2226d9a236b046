"""The backward passes of one agent: those that begin here, and its part in those of others."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from farcall.autograd import handlers
from farcall.autograd.context_state import Context
from farcall.autograd.ending import Ending
from farcall.autograd.handlers import PassOptions
from farcall.autograd.nodes import SentTensors
from farcall.autograd.passes import Pass
from farcall.autograd.ports import FailedPass, Recorded
from farcall.autograd.replicas import Replicas
from farcall.errors import CallError, Cancelled, RpcTimeout, UnknownWorker
from farcall.protocol.credit import WHOLE
from farcall.protocol.passes import ROOT
from farcall.runtime.agent import Agent
from farcall.runtime.calls import profiling
from farcall.runtime.calls.call_names import inherited_from
from farcall.runtime.calls.deferred import Deferred
from farcall.runtime.calls.future import Future
from farcall.runtime.context import CallContext, is_at_work, reset_context, set_context, waiting
from farcall.runtime.membership.peers import Peer
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.threads.function_queue import DEEPEST
from farcall.serde import add_note, message_of
from farcall.transport.base import Link
from farcall.transport.waiter import Alarm
from farcall.wire.frames import Frame
from farcall.wire.messages import CreditReturned, Gradients, Message, PassFailed

MODES = ("smart", "fast")

# In traces, a pass has the names that torch.distributed.autograd gives it. Gradients arrive where
# tensors were sent, and are sent from where those were received.
PASS_EVENT = "torch::distributed::autograd::backward"
ARRIVAL_EVENT = "torch::distributed::autograd::SendRpcBackward"
SENDING_EVENT = "torch::distributed::autograd::RecvRpcBackward"

PASS_MESSAGES: frozenset[type[Message]] = frozenset((Gradients, CreditReturned, PassFailed))


MODIFIED = "modified by an inplace operation"  # torch's words
ON_MODIFIED = (
    "A tensor of the graph was changed between its forward and its backward pass: by another "
    "trainer, perhaps, whose optimizer made a step on parameters that both use. Have trainers take "
    "turns (a lock around forward, backward and step), give each its own copy of the parameters, "
    "or add up gradients and step once."
)


class Runner:
    """See the module's description. Thread-safe.

    Args:
        on_leaf_gradients: see `Quirks`.
    """

    def __init__(
        self,
        agent: Agent,
        replicas: Replicas,
        recorded: Recorded,
        on_leaf_gradients: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], None],
    ) -> None:
        self.agent = agent
        self.replicas = replicas
        self._recorded = recorded
        self._lock = threading.Lock()  # guards the tables of passes
        self._alarms: list[Alarm] = []  # of threads that waited; to be used again
        self.on_leaf_gradients = on_leaf_gradients

    def close(self) -> None:
        """Close the alarms of passes: the agent shuts down."""
        while self._alarms:
            self._alarms.pop().close()

    # Passes that begin here.

    def backward(
        self,
        context: int,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: str = "smart",
    ) -> None:
        """See `farcall.autograd.backward`."""
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        known = self._recorded.find(context)
        source = SentTensors(ROOT, check_roots(roots))
        options = self.new_options(retain_graph or create_graph, create_graph, mode == "fast")
        number = options.id
        backward = Pass(self, known, options, source)
        with self._lock:
            known.passes[number] = backward
        try:
            self.agent.coordinator.begin(backward)
            with profiling.event(PASS_EVENT):
                backward.start()
                ones = {index: torch.ones_like(root) for index, root in enumerate(roots)}
                backward.deliver(source, WHOLE, ones)
                self._wait(backward)
            with self._lock:
                known.passes.pop(number, None)
        except BaseException as error:
            backward.abort(error)
            if MODIFIED in message_of(error):
                add_note(error, ON_MODIFIED)
            raise
        finally:
            try:
                self.agent.coordinator.end(backward)
            except BaseException:  # KeyboardInterrupt
                self.agent.coordinator.end(backward)
                raise

    def new_options(self, retain_graph: bool, create_graph: bool, fast: bool) -> PassOptions:
        """Return what all workers are told of a pass that begins here."""
        number = self._recorded.next_id()
        return PassOptions(number, retain_graph, create_graph, fast, self.agent.me.name)

    def _wait(self, backward: Pass) -> None:
        """Wait until the pass is over everywhere."""
        assert backward.ending is not None
        deadline, seconds, inherited = self.agent.limits.of_call(None)
        try:
            self._receive(backward, backward.ending, deadline)
            backward.ending.wait(deadline)
        except TimeoutError:
            if backward.error is not None:
                raise
            hint = "; pass rpc_timeout= in the options of init_rpc for more"
            raise RpcTimeout(
                f"{ran_too_long(seconds)}: a backward pass"
                + self.agent.shortage.describe()
                + (hint if inherited is None else inherited_from(inherited))
            ) from None

    def _receive(self, backward: Pass, ending: Ending, deadline: float) -> None:
        """Receive the pass's messages in this thread, as long as all go by one link.

        That saves handing over to a thread of the executor and back.
        """
        if len(backward.links) != 1:
            return
        try:
            alarm = self._alarms.pop()
        except IndexError:
            alarm = Alarm()
        at_work = is_at_work()
        ending.wake_by(alarm)
        try:
            while len(backward.links) == 1 and not ending.is_over:
                (link,) = backward.links
                if at_work:
                    with waiting():
                        frame = link.receive(PASS_MESSAGES, alarm.fileno(), deadline)
                else:
                    frame = link.receive(PASS_MESSAGES, alarm.fileno(), deadline)
                if frame is None:
                    return
                peer = self.agent.directory.of_incarnation(link.peer.incarnation)
                if peer is None or peer.loss_cause is not None:
                    return
                if isinstance(frame.message, Gradients):
                    try:
                        self.agent.coordinator.begin(frame)
                        self._deliver(peer, frame)
                    except BaseException:  # KeyboardInterrupt
                        self.agent.coordinator.end(frame)
                        raise
                else:
                    self.reported(peer, frame.message)  # type: ignore[arg-type]
        finally:
            ending.wake_by(None)
            if alarm.has_rung or self.agent.status.is_closed:
                alarm.close()
            else:
                self._alarms.append(alarm)

    def tell_all(self, context: int, backward: FailedPass) -> None:
        """Tell everybody who may take part in a pass that it has failed."""
        for incarnation in self._recorded.known_to(context):
            self.tell_failures(incarnation, context, [backward])

    def tell_failures(self, incarnation: int, context: int, passes: Sequence[FailedPass]) -> None:
        """Tell a worker which of these passes are known to have failed."""
        peer = self.agent.directory.of_incarnation(incarnation)
        for backward in passes:
            if backward.is_announced and peer is not None and peer.loss_cause is None:
                self._tell_of_failure(peer, context, backward)

    def _tell_of_failure(self, peer: Peer, context: int, backward: FailedPass) -> None:
        self.agent.executor.allow_promotion()
        reason = "" if backward.error is None else message_of(backward.error.error())
        call = (context, tuple(backward.options), reason)
        future = self.agent.call_async(peer.name, handlers.abort, call)
        future.add_done_callback(lambda _: None)  # a peer that can't be told has no part

    # Messages of passes.

    def send_gradients(
        self,
        peer: Peer,
        context: Context,
        options: PassOptions,
        number: int,
        credit: int,
        gradients: Mapping[int, torch.Tensor | None],
    ) -> Link:
        """Send gradients, of tensors that a peer sent with this number, and credit of the pass.

        Returns:
            The link that they went by.

        Raises:
            CallError: the peer is gone, or takes nothing for the agent's `rpc_timeout`.
        """
        with profiling.event(SENDING_EVENT):
            payload = self.agent.pickling.dump(gradients, peer)
            message = Gradients(context.id, options.id, number, credit, *options[1:-1])
            if options.trace:
                message.trace = dict(options.trace)
            if options.create_graph:
                _, message.sent = self._recorded.send(context.id, peer, payload.tensors)
            seconds = self.agent.status.rpc_timeout
            deadline = time.monotonic() + seconds if seconds else math.inf
            frame = Frame(message, 0, payload.body, payload.buffers)
            return self.agent.control.send(peer, frame, deadline)

    def give_back(self, context: Context, options: PassOptions, credit: int, missing: int) -> None:
        """Give credit of a pass back to its root."""
        self._report(options.root, CreditReturned(context.id, options.id, credit, missing))

    def tell_root(self, context: int, options: PassOptions) -> None:
        """Tell the root that the pass has failed here."""
        self._report(options.root, PassFailed(context, options.id))

    def _report(self, root: str, message: Message) -> None:
        self.agent.executor.allow_promotion()
        try:
            peer = self.agent.directory.resolve(root)
            if peer.worker is self.agent.me:
                self.reported(peer, message)  # type: ignore[arg-type]
            else:
                self.agent.control.report(peer, message)
        except (CallError, UnknownWorker):
            pass  # a root that is gone does not wait any more

    # Arrivals.

    def arrived(self, peer: Peer, frame: Frame) -> None:
        """Have a thread take the gradients of a message that arrived."""
        self.agent.coordinator.begin(frame)
        self.agent.executor.submit(lambda: self._deliver(peer, frame))

    def _deliver(self, peer: Peer, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Gradients)
        options = PassOptions(
            message.backward,
            message.retain_graph,
            message.create_graph,
            message.fast,
            message.root,
            message.trace,
        )
        # The gradients belong to the context's graph only if they have one themselves.
        active = message.context if message.create_graph else 0
        token = set_context(CallContext(self.agent, gradients=active, depth=DEEPEST))
        try:
            known = self._recorded.get(message.context)
            if known is None:
                self.tell_root(message.context, options)
                return
            backward = self._pass(known, options)
            try:
                attach = None
                if message.sent:
                    attach = self._recorded.receive(message.context, peer, message.sent)
                gradients = self.agent.serializer.load(
                    frame.body, frame.buffers, attach=attach, only=peer.only
                )
                frame.body, frame.buffers = b"", ()
                source = self._source(known, message.number)
                with profiling.event(ARRIVAL_EVENT):
                    backward.deliver(source, message.credit, gradients)
            except BaseException as error:
                backward.fail(error)
        finally:
            reset_context(token)
            self.agent.coordinator.end(frame)

    def _source(self, context: Context, number: int) -> SentTensors:
        source = context.source(number)
        if source is None:
            raise RuntimeError(
                f"worker {self.agent.me.name!r} sent no message {number} with tensors in autograd "
                f"context {context.id}"
            )
        return source

    def reported(self, peer: Peer, message: CreditReturned | PassFailed) -> None:
        """Take a peer's report on a pass that began here: its credit, or its failure."""
        known = self._recorded.get(message.context)
        backward: Pass | None = None if known is None else known.passes.get(message.backward)
        if backward is None:
            return
        if isinstance(message, CreditReturned):
            backward.credit_returned(peer, message.credit, message.missing)
        else:
            self.agent.executor.allow_promotion()
            backward.pass_failed(peer)

    # Calls of other workers; see `handlers`.

    def on_prepare(
        self, context: int, options: PassOptions, number: int, live: Sequence[int]
    ) -> Any:
        """See `handlers.prepare`."""
        known = self._recorded.find(context)
        source = self._source(known, number)
        return Deferred(self._pass(known, options).prepare(source, live))

    def on_survey(self, context: int, options: PassOptions) -> Any:
        """See `handlers.survey`."""
        return Deferred(self._pass(self._recorded.find(context), options).survey())

    def on_cause(self, context: int, number: int) -> Any:
        """See `handlers.cause`."""
        backward: Pass | None = self._recorded.find(context).passes.get(number)
        if backward is None or backward.error is None:
            raise RuntimeError(f"the backward pass did not fail on worker {self.agent.me.name!r}")
        failed: Future[None] = Future()
        failed.set_exception(backward.error.error())
        return Deferred(failed)

    def on_abort(self, context: int, options: PassOptions, reason: str) -> None:
        """See `handlers.abort`."""
        known = self._recorded.get(context)
        if known is not None:
            self._pass(known, options).abort(Cancelled(reason))

    def _pass(self, context: Context, options: PassOptions) -> Pass:
        with self._lock:
            found: Pass | None = context.passes.get(options.id)
            if found is None:
                found = context.passes[options.id] = Pass(self, context, options)
        return found


def check_roots(roots: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the roots of a backward pass.

    Raises:
        TypeError: they are no list of tensors.
        RuntimeError: there are none, or one is not a scalar or does not require grad.
    """
    if not isinstance(roots, list | tuple):
        raise TypeError(
            "incompatible function arguments: roots must be a list of tensors, "
            f"not {type(roots).__name__}"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"incompatible function arguments: root {index} must be a tensor, "
                f"not {type(root).__name__}"
            )
        if root.requires_grad and root.numel() == 1 and root.grad_fn is not None:
            continue
        which = f"root {index}, of shape {tuple(root.shape)},"
        if not root.requires_grad:
            raise RuntimeError(
                f"requires_grad not set on {which} so nothing can be differentiated: it "
                "does not require grad and does not have a grad_fn"
            )
        if root.numel() != 1:
            raise RuntimeError(f"{which} is not a scalar, all roots need to be scalar")
        raise RuntimeError(
            f"{which} does not have a valid gradient function: it is a leaf, and was not computed "
            "from anything"
        )
    return roots
