"""Distributed autograd of one agent: its contexts, what is recorded in them, and their passes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from farcall.autograd.passes import Options, Pass, abort
from farcall.autograd.records import Context, Receive, make_entries
from farcall.autograd.replicas import Replicas
from farcall.errors import Cancelled
from farcall.protocol.backward import ROOT
from farcall.protocol.contexts import CREATOR_SHIFT, Contexts, Dropped
from farcall.runtime.agent import Agent
from farcall.runtime.future import Future
from farcall.runtime.inbound import Deferred
from farcall.runtime.peers import Peer
from farcall.wire import HoldContext, ReleaseContext

MODES = ("smart", "fast")


class Autograd:
    """Implements `runtime.gradients.Gradients`. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.replicas = Replicas()
        self._lock = threading.Lock()
        # A worker that takes the place of a dead one starts above all that the dead one used, if
        # that made less than 2**17 contexts a second.
        self._contexts: Contexts[Context] = Contexts(agent.me.id, int(time.time()) << 17)
        self._numbers = itertools.count(1)

    # Contexts.

    def open(self) -> int:
        """A new context of this worker: its id."""
        self.replicas.watch()
        with self._lock:
            context = self._contexts.next_id()
            self._contexts.create(context, Context(context))
        return context

    def end(self, context: int) -> None:
        """Forget a context here, and tell everybody who knows of it."""
        with self._lock:
            ended = self._contexts.end(context)
        if ended is not None:
            dropped, floor = ended
            self._drop(context, dropped, floor)

    def _drop(self, context: int, dropped: Dropped[Context], floor: int) -> None:
        self.replicas.forget(context)
        for backward in list(dropped.content.passes.values()):
            backward.fail(Cancelled(f"autograd context {context} ended"))
        dropped.content.clear()
        message = ReleaseContext(context, floor)
        for peer in dropped.told:
            self.agent.control.post(peer, message, 0)

    def find(self, context: int) -> Context:
        """The context of this id.

        Raises:
            TypeError: that is no id.
            RuntimeError: this worker has no such context.
        """
        if not isinstance(context, int) or isinstance(context, bool):
            raise TypeError(
                "incompatible function arguments: a context id is the int that "
                "`with context() as context_id` gives, "
                f"not {type(context).__name__}"
            )
        found = self._contexts.get(context)
        if found is None:
            raise RuntimeError(
                f"Could not find autograd context with id: {context}. It ended, or worker "
                f"{self.agent.me.name!r} took no part in it"
            )
        return found

    def __len__(self) -> int:
        """How many contexts this worker has."""
        return len(self._contexts)

    # What the agent tells; see `Gradients`.

    def send(self, context: int, peer: Peer, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        known = self._shared_with(context, peer)
        if known is None:
            return 0, 0
        if not tensors:
            return context, 0
        number = next(self._numbers)
        known.record_send(number, tensors)
        return context, number

    def enter(self, context: int, peer: Peer) -> int:
        self.replicas.watch()
        if peer.worker is self.agent.me:
            return context if self._contexts.get(context) is not None else 0
        with self._lock:
            known = self._contexts.enter(context, peer.incarnation, Context(context))
        if known is not None and peer.lost is not None:
            self.lost(peer)
        return 0 if known is None else context

    def _shared_with(self, context: int, peer: Peer) -> Context | None:
        """What a context holds that a peer is given; None if it has ended."""
        if peer.worker is self.agent.me:
            return self._contexts.get(context)
        with self._lock:
            return self._contexts.tell(context, peer.incarnation)

    def receive(
        self, context: int, peer: Peer, sent: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        known = self._contexts.get(context)
        return None if known is None else Receive(known, peer, sent).attach

    def released(self, context: int, floor: int) -> None:
        with self._lock:
            dropped = self._contexts.released(context, floor)
        if dropped is not None:
            self.agent.executor.may_pass_lead()
            self._drop(context, dropped, floor)

    def held(self, context: int, peer: Peer) -> None:
        with self._lock:
            floor = self._contexts.held(context, peer.incarnation)
        if floor:
            self.agent.control.post(peer.incarnation, ReleaseContext(context, floor), 0)

    def lost(self, peer: Peer) -> None:
        with self._lock:
            given = self._contexts.lost(peer.incarnation)
            made = set(self._contexts.made_by(peer.worker.id))
        if self.agent.directory.of_id(peer.worker.id) is not peer:
            made.intersection_update(given)  # the others belong to who took its place
        for context in made:
            self.released(context, floor=1)
        for context in given:
            if context not in made:
                self._report(context)

    def _report(self, context: int) -> None:
        """Let the creator of a context know that we have it."""
        creator = self.agent.directory.of_id(context >> CREATOR_SHIFT)
        if creator is None or creator.lost is not None:
            self.released(context, floor=1)
        else:
            self.agent.control.post(creator.incarnation, HoldContext(context), 0)

    def close(self) -> None:
        self.replicas.close()
        with self._lock:
            contexts = self._contexts.close()
        for context in contexts:
            for backward in list(context.passes.values()):
                backward.fail(Cancelled(f"the agent of {self.agent.me.name!r} was shut down"))
            context.clear()

    # Passes.

    def backward(
        self,
        context: int,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: str = "smart",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        known = self.find(context)
        entries = make_entries(ROOT, check_roots(roots))
        with self._lock:
            number = self._contexts.next_id()
        retain_graph = retain_graph or create_graph
        me = self.agent.me.name
        options = Options(number, retain_graph, create_graph, mode == "fast", me)
        backward = known.passes[number] = Pass(self, known, options)
        # Like torch's engine, create_graph does not care for the caller's no_grad.
        grad = torch.enable_grad() if create_graph else nullcontext()
        try:
            with grad:
                backward.start(entries)
                ones = {index: torch.ones_like(root) for index, root in enumerate(roots)}
                done = backward.deliver(ROOT, ones)
                if done is not None:
                    done.wait()
                backward.check_complete()
            known.passes.pop(number, None)
        except BaseException as error:
            self._abort(known, backward, error)
            raise

    def _abort(self, context: Context, backward: Pass, error: BaseException) -> None:
        """End a pass here, and tell everybody who may take part in it."""
        backward.fail(error)
        if not backward.announce():
            return
        with self._lock:
            told = self._contexts.told(context.id)
        for incarnation in told:
            peer = self.agent.directory.of_incarnation(incarnation)
            if peer is not None and peer.lost is None:
                call = (context.id, tuple(backward.options), str(error))
                future = self.agent.call_async(peer.name, abort, call)
                future.add_done_callback(lambda _: None)  # who can't be told has no part in it

    # Messages of other workers; see `passes`.

    def on_prepare(self, context: int, options: Options, number: int, live: Sequence[int]) -> Any:
        known = self.find(context)
        entries = known.sends.get(number)
        if entries is None:
            raise RuntimeError(
                f"Trying to backward a second time through tensors that worker "
                f"{self.agent.me.name!r} sent in autograd context {context}: specify "
                "retain_graph=True when calling backward the first time"
            )
        return _answer(self._pass(known, options).prepare(number, entries, live), {})

    def on_survey(self, context: int, options: Options) -> Any:
        return Deferred(self._pass(self.find(context), options).survey())

    def on_deliver(
        self, context: int, options: Options, number: int, gradients: Mapping[int, Any]
    ) -> Any:
        backward = self._pass(self.find(context), options)
        answer = backward.deliver(number, gradients)
        return _answer(answer, backward.waiting)

    def on_abort(self, context: int, options: Options, reason: str) -> None:
        known = self._contexts.get(context)
        if known is not None:
            self._abort(known, self._pass(known, options), Cancelled(reason))

    def _pass(self, context: Context, options: Options) -> Pass:
        with self._lock:
            found: Pass | None = context.passes.get(options.id)
            if found is None:
                found = context.passes[options.id] = Pass(self, context, options)
        return found


def _answer(future: Future[Any] | None, now: Any) -> Any:
    return now if future is None else Deferred(future)


def check_roots(roots: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The roots of a backward pass.

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
        which = f"root {index}, of shape {tuple(root.shape)},"
        if not root.requires_grad:
            raise RuntimeError(
                f"requires_grad not set on {which} so nothing can be differentiated: it "
                "does not require grad and does not have a grad_fn"
            )
        if root.numel() != 1:
            raise RuntimeError(f"{which} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(
                f"{which} does not have a valid gradient function: it is a leaf, and was not "
                "computed from anything"
            )
    return roots
