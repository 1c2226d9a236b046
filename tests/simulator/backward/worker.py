"""A simulated worker in backward passes: executes what its machines say.

The counterpart of `farcall.autograd.autograd` and `runner`. A call that is not answered fails when
the callee is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farcall.protocol.contexts import Contexts, DropContext, ReportHeld, TellEnd, TellFailures
from farcall.protocol.pass_instructions import AskCause, AskRoot, ReturnCredit, TellRoot
from simulator.backward.history import Node
from simulator.backward.machines import Machines
from simulator.backward.messages import (
    Abort,
    AboutPass,
    Answered,
    Forward,
    Grad,
    Options,
    Prepare,
)
from simulator.backward.passes import Content, SimulatedPass
from simulator.backward.world import Run, World

T = TypeVar("T")


class Worker:
    """One worker. Its id is its incarnation, too: none comes back."""

    def __init__(self, id: int, machines: Machines, world: World) -> None:
        self.id = id
        self.contexts: Contexts[Content] = machines.contexts(id, 0)
        self.machines = machines
        self.world = world
        self.lost_peers: set[int] = set()
        self._calls: dict[int, tuple[int, Callable[[Answered], None]]] = {}
        self._count = 0

    # Messages.

    def send(self, peer: int, message: Any) -> None:
        """Send something that is not answered."""
        if peer not in self.lost_peers:
            self.world.send(self.id, peer, message, 0)

    def call(self, peer: int, message: Any, on_answer: Callable[[Answered], None]) -> None:
        """Send something that is answered, or fails."""
        self._count += 1
        self._calls[self._count] = (peer, on_answer)
        if peer in self.lost_peers:
            self._fail_call(self._count)
        else:
            self.world.send(self.id, peer, message, self._count)

    @property
    def open_calls(self) -> int:
        """Return how many calls have no answer yet."""
        return len(self._calls)

    def _fail_call(self, call: int) -> None:
        peer, on_answer = self._calls.pop(call)
        on_answer(Answered(call, f"lost {peer}"))

    def receive(self, peer: int, message: Any, call: int) -> None:
        """Act on a message that arrives."""
        if peer in self.lost_peers:
            return

        match message:
            case AboutPass():
                self._about_pass(peer, message, call)
            case Answered(call=answered):
                waiting = self._calls.pop(answered, None)
                if waiting is not None:
                    waiting[1](message)
            case TellEnd(context=context, low_watermark=low_watermark):
                self._carry_out(self.contexts.released(context, low_watermark))
            case ReportHeld(context=context):
                self._carry_out(self.contexts.held(context, peer))
            case Forward(context=context):
                self.enter(context, peer, Content({}, {}))

    def _about_pass(self, peer: int, message: AboutPass, call: int) -> None:
        def answer(error: str) -> None:
            self.send(peer, Answered(call, error))

        context, options, what = message
        content = self.contexts.get(context)
        if content is None:
            if call:
                answer(f"no context {context}")
            elif isinstance(what, Grad):
                self.send(options.root, AboutPass(context, options, TellRoot()))
            return
        known = content.passes.get(options)
        match what:
            case ReturnCredit(credit=credit, missing=missing) if known is not None:
                known.report(known.machine.credit_returned, peer, credit, missing)
            case TellRoot() if known is not None:
                known.report(known.machine.pass_failed, peer)
            case AskCause():
                answer((known and known.error) or f"no failed pass {options}")
            case AskRoot():
                backward = self._pass(context, content, options)
                backward.report(backward.machine.survey, answer)
            case Abort(reason=reason):
                backward = self._pass(context, content, options)
                backward.report(backward.machine.abort, reason)
            case Prepare(number=number, live=live):
                if number in content.sends:
                    self._pass(context, content, options).prepare(number, live, answer)
                else:
                    answer("backward a second time")
            case Grad(number=number, credit=credit, gradients=gradients):
                backward = self._pass(context, content, options)
                if number in content.sends:
                    backward.deliver(number, dict(gradients), credit)
                else:
                    backward.fail("backward a second time")

    def _pass(self, context: int, content: Content, options: Options) -> SimulatedPass:
        found = content.passes.get(options)
        if found is None:
            found = content.passes[options] = SimulatedPass(self, context, content, options)
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
        """Give a context to a peer, with a call, or return None if it has ended."""
        if peer == self.id:
            return self.contexts.get(context)
        if self.contexts.has_parted(context, peer):
            raise AssertionError(f"{self.id} gives context {context} to {peer}, which has lost it")
        return self.contexts.tell(context, peer)

    def enter(self, context: int, peer: int, content: Content) -> None:
        """Enter a context that a peer has sent."""
        if peer == self.id:
            return
        known = self.contexts.enter(context, peer, content)
        if known is not None and peer in self.lost_peers:
            self._lose_part(peer)

    def end(self, context: int) -> None:
        """End a context that was made here."""
        self._carry_out(self.contexts.end(context))
        self._carry_out(self.contexts.end(context))  # no effect

    def _carry_out(
        self, todo: Sequence[DropContext[Content] | TellEnd | ReportHeld | TellFailures[Content]]
    ) -> None:
        self.carry_out(todo, self._do)

    def carry_out(self, todo: Sequence[T], do: Callable[[T], None]) -> None:
        """Do what a machine said. As in threads, other events may come before and between."""

        def slowly() -> Run:
            for instruction in todo:
                yield True
                do(instruction)

        if self.world.is_held_up():
            self.world.start(self.id, slowly(), lambda: None)
        else:
            for instruction in todo:
                do(instruction)

    def _do(
        self, instruction: DropContext[Content] | TellEnd | ReportHeld | TellFailures[Content]
    ) -> None:
        match instruction:
            case DropContext(content=content):
                for backward in list(content.passes.values()):
                    backward.report(backward.machine.stop, "the context ended")
            case TellEnd(peer=peer) | ReportHeld(peer=peer):
                self.send(peer, instruction)
            case TellFailures(peer=peer, context=context, content=content):
                for backward in content.passes.values():
                    abort = Abort(backward.error)
                    if backward.machine.is_announced:
                        self.send(peer, AboutPass(context, backward.options, abort))

    def on_peer_lost(self, peer: int) -> None:
        """Declare a peer dead."""
        self.lost_peers.add(peer)
        for call in [call for call, (to, _) in self._calls.items() if to == peer]:
            if call in self._calls:
                self._fail_call(call)
        self._lose_part(peer)

    def _lose_part(self, peer: int) -> None:
        """Lose a peer in contexts, and in their passes."""

        def living(id: int) -> int | None:
            return None if id in self.lost_peers else id

        todo = self.contexts.on_peer_lost(peer, peer, is_replaced=False, living=living)
        for content in list(self.contexts):
            for backward in list(content.passes.values()):
                backward.report(backward.machine.on_peer_lost, peer, peer, f"lost {peer}")
        self._carry_out(todo)
