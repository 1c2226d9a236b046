"""A simulated worker in backward passes: executes what its machines say.

The counterpart of `farcall.autograd.recorder` and `runner`. A call that is not answered fails when
the callee is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farcall.protocol.contexts import Contexts, DropContext, ReportHeld, TellEnd, TellFailures
from farcall.protocol.passes import PassMachine
from farcall.testing.backward.history import Node
from farcall.testing.backward.messages import (
    Abort,
    Answered,
    Broken,
    Cause,
    Forward,
    Grad,
    Holds,
    Options,
    Prepare,
    Ran,
    Released,
    Survey,
)
from farcall.testing.backward.passes import Content, SimulatedPass
from farcall.testing.backward.reach import SimulatedReach
from farcall.testing.backward.world import World


class Machines(NamedTuple):
    """The classes a worker is made of; a planted bug replaces one."""

    passes: type[PassMachine] = PassMachine
    contexts: type[Contexts[Any]] = Contexts
    reach: type[SimulatedReach] = SimulatedReach


class Worker:
    """One worker. Its id is its incarnation, too: nobody comes back."""

    def __init__(self, id: int, machines: Machines, world: World) -> None:
        self.id = id
        self.contexts: Contexts[Content] = machines.contexts(id, 0)
        self.machines = machines
        self.world = world
        self.lost: set[int] = set()
        self._calls: dict[int, tuple[int, Callable[[Answered], None]]] = {}
        self._count = 0

    # Messages.

    def send(self, peer: int, message: Any) -> None:
        """Send something that is not answered."""
        if peer not in self.lost:
            self.world.send(self.id, peer, message, 0)

    def call(self, peer: int, message: Any, on_answer: Callable[[Answered], None]) -> None:
        """Send something that is answered, or fails."""
        self._count += 1
        self._calls[self._count] = (peer, on_answer)
        if peer in self.lost:
            self._fail_call(self._count)
        else:
            self.world.send(self.id, peer, message, self._count)

    @property
    def open_calls(self) -> int:
        """How many calls have no answer yet."""
        return len(self._calls)

    def _fail_call(self, call: int) -> None:
        peer, on_answer = self._calls.pop(call)
        on_answer(Answered(call, f"lost {peer}"))

    def receive(self, peer: int, message: Any, call: int) -> None:
        """A message arrives."""
        if peer in self.lost:
            return

        if isinstance(message, Prepare | Survey | Cause):
            self._serve(peer, message, call)
        elif isinstance(message, Grad):
            self._deliver(message)
        elif isinstance(message, Ran | Broken):
            content = self.contexts.get(message.context)
            backward = None if content is None else content.passes.get(message.options)
            if backward is None:
                return
            if isinstance(message, Ran):
                backward.report(backward.machine.returned, peer, message.share, message.missing)
            else:
                backward.report(backward.machine.broken, peer)
        elif isinstance(message, Answered):
            waiting = self._calls.pop(message.call, None)
            if waiting is not None:
                waiting[1](message)
        elif isinstance(message, Abort):
            content = self.contexts.get(message.context)
            if content is not None:
                backward = self._pass(content, message)
                backward.report(backward.machine.abort, message.reason)
        elif isinstance(message, Released):
            self._carry_out(self.contexts.released(message.context, message.floor))
        elif isinstance(message, Holds):
            self._carry_out(self.contexts.held(message.context, peer))
        elif isinstance(message, Forward):
            self.enter(message.context, peer, Content({}, {}))

    def _serve(self, peer: int, message: Prepare | Survey | Cause, call: int) -> None:
        def answer(error: str) -> None:
            self.send(peer, Answered(call, error))

        content = self.contexts.get(message.context)
        if content is None:
            answer(f"no context {message.context}")
        elif isinstance(message, Survey):
            surveyed = self._pass(content, message)
            surveyed.report(surveyed.machine.survey, answer)
        elif isinstance(message, Cause):
            backward = content.passes.get(message.options)
            answer((backward and backward.error) or f"no failed pass {message.options}")
        elif message.number not in content.sends:
            answer("backward a second time")
        else:
            self._pass(content, message).prepare(message.number, message.live, answer)

    def _deliver(self, message: Grad) -> None:
        content = self.contexts.get(message.context)
        if content is None:
            self.send(message.options.root, Broken(message.context, message.options))
            return
        backward = self._pass(content, message)
        if message.number in content.sends:
            backward.deliver(message.number, dict(message.gradients), message.share)
        else:
            backward.fail("backward a second time")

    def _pass(self, content: Content, message: Prepare | Grad | Survey | Abort) -> SimulatedPass:
        found = content.passes.get(message.options)
        if found is None:
            found = SimulatedPass(self, message.context, content, message.options)
            content.passes[message.options] = found
        return found

    # Passes.

    def backward(self, context: int, options: Options, roots: Sequence[Node]) -> None:
        """Begin a pass; `World.ended` says when it ends."""
        content = self.contexts.get(context)
        assert content is not None
        backward = content.passes[options] = SimulatedPass(self, context, content, options, roots)
        backward.start()

    # Contexts.

    def give(self, context: int, peer: int) -> Content | None:
        """Give a context to a peer, with a call; None: it has ended."""
        return self.contexts.get(context) if peer == self.id else self.contexts.tell(context, peer)

    def enter(self, context: int, peer: int, content: Content) -> None:
        """A peer gives us a context."""
        if peer == self.id:
            return
        known = self.contexts.enter(context, peer, content)
        if known is not None and peer in self.lost:
            self._lose_contexts(peer)

    def end(self, context: int) -> None:
        """A context that was made here ends."""
        self._carry_out(self.contexts.end(context))

    def _carry_out(
        self, todo: Sequence[DropContext[Content] | TellEnd | ReportHeld | TellFailures[Content]]
    ) -> None:
        for instruction in todo:
            match instruction:
                case DropContext(content=content):
                    for backward in list(content.passes.values()):
                        backward.report(backward.machine.stop, "the context ended")
                case TellEnd(peer=peer, context=context, floor=floor):
                    self.send(peer, Released(context, floor))
                case ReportHeld(creator=creator, context=context):
                    self.send(creator, Holds(context))
                case TellFailures(peer=peer, context=context, content=content):
                    for backward in content.passes.values():
                        if backward.machine.is_announced:
                            self.send(peer, Abort(context, backward.options, backward.error))

    def lose(self, peer: int) -> None:
        """Declare a peer dead."""
        self.lost.add(peer)
        for call in [call for call, (to, _) in self._calls.items() if to == peer]:
            if call in self._calls:
                self._fail_call(call)
        for content in list(self.contexts):
            for backward in list(content.passes.values()):
                backward.report(backward.machine.lost, peer, peer, f"lost {peer}")
        self._lose_contexts(peer)

    def _lose_contexts(self, peer: int) -> None:
        gone = self.lost.__contains__
        self._carry_out(self.contexts.lost(peer, peer, is_replaced=False, is_gone=gone))
