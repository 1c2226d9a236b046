"""A simulated worker in backward passes: the pure counterpart of `farcall.autograd.recorder`.

Rules of it, all of them here:

- A pass that fails is told, once, to all that the context was given to; and to who reports later.
- A call that is not answered fails when the callee is lost.
- A pass that sent gradients to a worker fails when that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farcall.protocol.backward import ROOT, WHOLE, Backward, Returned
from farcall.protocol.contexts import Contexts, Drop, Report, Tell, TellFailures
from farcall.testing.backward.history import Node
from farcall.testing.backward.messages import (
    Abort,
    Answer,
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
from farcall.testing.backward.passes import Content, Pass
from farcall.testing.backward.world import World


class Machines(NamedTuple):
    """The classes a worker is made of; a planted bug replaces one."""

    backward: type[Backward] = Backward
    returned: type[Returned] = Returned
    passes: type[Pass] = Pass
    contexts: type[Contexts[Any]] = Contexts


class Worker:
    """One worker. Its id is its incarnation, too: nobody comes back."""

    def __init__(self, id: int, machines: Machines, world: World) -> None:
        self.id = id
        self.contexts: Contexts[Content] = machines.contexts(id, 0)
        self.machines = machines
        self.world = world
        self.lost: set[int] = set()
        self._calls: dict[int, tuple[int, Callable[[Answer], None]]] = {}
        self._count = 0

    # Messages.

    def send(self, peer: int, message: Any) -> None:
        """Send something that is not answered."""
        if peer not in self.lost:
            self.world.send(self.id, peer, message, 0)

    def call(self, peer: int, message: Any, on_answer: Callable[[Answer], None]) -> None:
        """Send something that is answered, or fails."""
        self._count += 1
        self._calls[self._count] = (peer, on_answer)
        if peer in self.lost:
            self._fail_call(self._count)
        else:
            self.world.send(self.id, peer, message, self._count)

    def _fail_call(self, call: int) -> None:
        peer, on_answer = self._calls.pop(call)
        on_answer(Answer(call, f"lost {peer}"))

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
                backward.take_back(peer, message.share, message.missing)
            else:
                backward.broken(peer)
        elif isinstance(message, Answer):
            waiting = self._calls.pop(message.call, None)
            if waiting is not None:
                waiting[1](message)
        elif isinstance(message, Abort):
            content = self.contexts.get(message.context)
            if content is not None:
                self.abort(message.context, self._pass(content, message), message.reason)
        elif isinstance(message, Released):
            self._carry_out(self.contexts.released(message.context, message.floor))
        elif isinstance(message, Holds):
            self._carry_out(self.contexts.held(message.context, peer))
        elif isinstance(message, Forward):
            self.enter(message.context, peer, Content({}))

    def _serve(self, peer: int, message: Prepare | Survey | Cause, call: int) -> None:
        def answer(error: str) -> None:
            self.send(peer, Answer(call, error))

        content = self.contexts.get(message.context)
        if content is None:
            answer(f"no context {message.context}")
        elif isinstance(message, Survey):
            self._pass(content, message).survey(answer)
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

    def _pass(self, content: Content, message: Prepare | Grad | Survey | Abort) -> Pass:
        found = content.passes.get(message.options)
        if found is None:
            found = self.machines.passes(self, message.context, content, message.options)
            content.passes[message.options] = found
        return found

    # Passes.

    def backward(self, context: int, options: Options, roots: Sequence[Node]) -> None:
        """Begin a pass; `World.ended` says when it ends."""
        content = self.contexts.get(context)
        assert content is not None
        backward = self.machines.passes(self, context, content, options, roots)
        content.passes[options] = backward

        def known(error: str) -> None:
            if error:
                backward.fail(error)
            else:
                backward.begin()
                deliver()

        def deliver() -> None:
            backward.deliver(ROOT, dict.fromkeys(range(len(roots)), 1), WHOLE)

        if backward.decide() or options.fast:
            deliver()
        else:
            backward.survey(known)

    def abort(self, context: int, backward: Pass, reason: str) -> None:
        """End a pass here, and tell everybody who may take part in it, once."""
        backward.stop(reason)
        if not backward.announced:
            backward.announced = True
            for peer in self.contexts.known_to(context):
                self.send(peer, Abort(context, backward.options, reason))

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
        self, todo: Sequence[Drop[Content] | Tell | Report | TellFailures[Content]]
    ) -> None:
        for instruction in todo:
            match instruction:
                case Drop(content=content):
                    for backward in list(content.passes.values()):
                        backward.stop("the context ended")
                case Tell(peer=peer, context=context, floor=floor):
                    self.send(peer, Released(context, floor))
                case Report(creator=creator, context=context):
                    self.send(creator, Holds(context))
                case TellFailures(peer=peer, context=context, content=content):
                    for backward in content.passes.values():
                        if backward.announced:
                            self.send(peer, Abort(context, backward.options, backward.error))

    def lose(self, peer: int) -> None:
        """Declare a peer dead."""
        self.lost.add(peer)
        for call in [call for call, (to, _) in self._calls.items() if to == peer]:
            if call in self._calls:
                self._fail_call(call)
        for content in list(self.contexts):
            for backward in list(content.passes.values()):
                backward.lost(peer)
        self._lose_contexts(peer)

    def _lose_contexts(self, peer: int) -> None:
        gone = self.lost.__contains__
        self._carry_out(self.contexts.lost(peer, peer, is_replaced=False, is_gone=gone))
