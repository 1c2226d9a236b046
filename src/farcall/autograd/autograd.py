"""Distributed autograd of one agent: its contexts, and their records."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence

import torch

from farcall.autograd.context_state import Context
from farcall.autograd.nodes import Kept, ReceivedTensors
from farcall.autograd.replicas import Replicas
from farcall.autograd.runner import Runner
from farcall.errors import PeerLost, SerializationError
from farcall.ids import MET_AGAIN
from farcall.protocol.contexts import (
    LIVES,
    Contexts,
    DropContext,
    ReportHeld,
    TellEnd,
    TellFailures,
)
from farcall.runtime.agent import Agent
from farcall.runtime.membership.peers import Peer
from farcall.runtime.quirks import Quirks
from farcall.serde import Attach
from farcall.serde.tensors import described, is_recorded
from farcall.wire.frames import Frame
from farcall.wire.messages import CreditReturned, HoldContext, PassFailed, ReleaseContext

_UNRECORDED = (
    "{} that requires grad can't be sent in an autograd context: gradients don't flow through "
    "tensors of that kind between workers; send its parts, or what detach() gives"
)


class Autograd:
    """Implements `runtime.gradients.DistributedGradients`. Thread-safe."""

    def __init__(self, agent: Agent, quirks: Quirks) -> None:
        self.agent = agent
        self.replicas = Replicas()
        self._lock = threading.Lock()
        # No clock will do: a worker that takes a dead one's id may run on another machine.
        life = secrets.randbelow(LIVES)
        self._contexts: Contexts[Context] = Contexts(agent.me.id, life)
        self._numbers = itertools.count(1)
        self.runner = Runner(agent, self.replicas, self, quirks.on_leaf_gradients)

    def backward(
        self,
        context: int,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: str = "smart",
    ) -> None:
        self.runner.backward(
            context, roots, retain_graph=retain_graph, create_graph=create_graph, mode=mode
        )

    # Contexts.

    def open(self) -> int:
        """Return a new context of this worker: its id."""
        self.replicas.watch()
        with self._lock:
            context = self._contexts.next_id()
            self._contexts.create(context, Context(context))
        return context

    def end(self, context: int) -> None:
        """Discard a context here, and tell everybody who knows of it."""
        with self._lock:
            todo = self._contexts.end(context)
        self._carry_out(todo)

    def _carry_out(
        self, todo: Sequence[DropContext[Context] | TellEnd | ReportHeld | TellFailures[Context]]
    ) -> None:
        post = self.agent.control.post
        for instruction in todo:
            match instruction:
                case DropContext(context=context, content=content):
                    self.replicas.on_context_released(context)
                    for backward in list(content.passes.values()):
                        backward.drop(f"autograd context {context} ended")
                    content.clear()
                case TellEnd(peer=peer, context=context, low_watermark=low_watermark):
                    post(peer, ReleaseContext(context, low_watermark), 0)
                case ReportHeld(peer=peer, context=context):
                    post(peer, HoldContext(context), 0)
                case TellFailures(peer=peer, context=context, content=content):
                    self.runner.tell_failures(peer, context, list(content.passes.values()))

    def find(self, context: int) -> Context:
        """Return the context of this id.

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

    def get(self, context: int) -> Context | None:
        """Return the context of this id, if there is one."""
        return self._contexts.get(context)

    def known_to(self, context: int) -> tuple[int, ...]:
        """Incarnations that have the context, as far as we know."""
        with self._lock:
            return self._contexts.known_to(context)

    def next_id(self) -> int:
        """Return a number that no other context or pass has; those of this worker only grow."""
        with self._lock:
            return self._contexts.next_id()

    def __len__(self) -> int:
        """Return how many contexts this worker has."""
        return len(self._contexts)

    def passes(self) -> int:
        """Return how many backward passes go on that began here."""
        with self._lock:
            passes = [each for known in self._contexts for each in known.passes.values()]
        return sum(backward.ending is not None for backward in passes)

    # Events from the agent; see `DistributedGradients`.

    def send(
        self, context: int, peer: Peer, tensors: Sequence[torch.Tensor], waits: bool = False
    ) -> tuple[int, int]:
        for tensor in tensors:
            if not is_recorded(tensor):
                raise SerializationError(_UNRECORDED.format(described(tensor)))
        known = self._shared_with(context, peer)
        if known is None:
            return 0, 0
        if not tensors:
            return context, 0
        number = next(self._numbers)
        known.announce(number, tensors, waits)
        return context, number

    def keep(self, tensors: Sequence[torch.Tensor]) -> Attach:
        return Kept(tensors).attach

    def record(self, context: int, sent: int) -> None:
        known = self._contexts.get(context)
        if known is not None:
            known.record(sent)

    def enter(self, context: int, peer: Peer) -> int:
        found = self._contexts.get(context)
        if peer.worker is self.agent.me:
            return 0 if found is None else context
        if found is None:
            self.replicas.watch()
            found = Context(context)
        with self._lock:
            known = self._contexts.enter(context, peer.incarnation, found)
        if known is not None and peer.loss_cause is not None:
            self.on_peer_lost(peer)
        return 0 if known is None else context

    def _shared_with(self, context: int, peer: Peer) -> Context | None:
        """Return the part of a context that a peer is given; None if it has ended.

        Raises:
            PeerLost: the peer has lost what it had of the context.
        """
        if peer.worker is self.agent.me:
            return self._contexts.get(context)
        if peer.incarnation >= MET_AGAIN and self._contexts.has_parted(context, peer.incarnation):
            raise PeerLost(
                peer.name,
                f"it had a part in autograd context {context} when it was lost, and has met this "
                "worker again since: begin a new context",
            )
        with self._lock:
            return self._contexts.tell(context, peer.incarnation)

    def receive(
        self, context: int, peer: Peer, sent: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        known = self._contexts.get(context)
        if known is None:
            return None
        return ReceivedTensors(peer, sent, context, known.receives).attach

    def released(self, context: int, low_watermark: int) -> None:
        with self._lock:
            todo = self._contexts.released(context, low_watermark)
        if todo:
            self.agent.executor.allow_promotion()
            self._carry_out(todo)

    def held(self, context: int, peer: Peer) -> None:
        with self._lock:
            todo = self._contexts.held(context, peer.incarnation)
        self._carry_out(todo)

    def on_peer_lost(self, peer: Peer) -> None:
        id = peer.worker.id
        is_replaced = self.agent.directory.of_key(id) is not peer
        with self._lock:
            todo = self._contexts.on_peer_lost(
                peer.incarnation, id, is_replaced=is_replaced, living=self._living
            )
            passes = [backward for known in self._contexts for backward in known.passes.values()]
        for backward in passes:
            backward.on_peer_lost(peer)
        self.agent.executor.allow_promotion()
        self._carry_out(todo)

    def _living(self, id: int) -> int | None:
        """Return the incarnation of the living worker with this id, or None."""
        worker = self.agent.directory.of_key(id)
        return None if worker is None or worker.loss_cause is not None else worker.incarnation

    def close(self) -> None:
        self.replicas.close()
        self.runner.close()
        with self._lock:
            contexts = self._contexts.close()
        for context in contexts:
            for backward in list(context.passes.values()):
                backward.drop(f"the agent of {self.agent.me.name!r} was shut down")
            context.clear()

    # Passes.

    def arrived(self, peer: Peer, frame: Frame) -> None:
        self.runner.arrived(peer, frame)

    def reported(self, peer: Peer, message: CreditReturned | PassFailed) -> None:
        self.runner.reported(peer, message)
