"""A simulated worker in backward passes: the pure counterpart of `farcall.autograd.recorder`.

Rules of it that `Contexts` relies on, all of them here:

- Who loses the creator of a context ends the context in its place. Who loses another worker that
  gave it one reports to the creator.
- A pass that fails is told, once, to all that the context was given to.
- A call that is not answered fails when the callee is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farcall.protocol.backward import ROOT, Backward
from farcall.protocol.contexts import CREATOR_SHIFT, Contexts, Dropped
from farcall.testing.backward.history import Node
from farcall.testing.backward.messages import (
    Abort,
    Answer,
    Forward,
    Grad,
    Holds,
    Options,
    Prepare,
    Released,
    Survey,
    Waiting,
)
from farcall.testing.backward.passes import Content, OnAnswer, Pass, World


class Machines(NamedTuple):
    """The classes a worker is made of; a planted bug replaces one."""

    backward: type[Backward] = Backward
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
        on_answer(Answer(call, {}, f"lost {peer}"))

    def receive(self, peer: int, message: Any, call: int) -> None:
        """A message arrives."""
        if peer in self.lost:
            return

        def answer(waiting: Waiting, error: str) -> None:
            self._send(peer, Answer(call, waiting, error))

        if isinstance(message, Prepare | Grad | Survey):
            self._serve(message, answer)
        elif isinstance(message, Answer):
            waiting = self._calls.pop(message.call, None)
            if waiting is not None:
                waiting[1](message)
        elif isinstance(message, Abort):
            content = self.contexts.get(message.context)
            if content is not None:
                self.abort(message.context, self._pass(content, message), message.reason)
        elif isinstance(message, Released):
            self._release(message.context, message.floor)
        elif isinstance(message, Holds):
            floor = self.contexts.held(message.context, peer)
            if floor:
                self._send(peer, Released(message.context, floor))
        elif isinstance(message, Forward):
            self.enter(message.context, peer, Content({}))

    def _serve(self, message: Prepare | Grad | Survey, answer: OnAnswer) -> None:
        content = self.contexts.get(message.context)
        if content is None:
            answer({}, f"no context {message.context}")
        elif isinstance(message, Survey):
            self._pass(content, message).survey(answer)
        elif message.number not in content.sends:
            answer({}, "backward a second time")
        elif isinstance(message, Prepare):
            self._pass(content, message).prepare(message.number, message.live, answer)
        else:
            self._pass(content, message).deliver(message.number, dict(message.gradients), answer)

    def _pass(self, content: Content, message: Prepare | Grad | Survey | Abort) -> Pass:
        found = content.passes.get(message.options)
        if found is None:
            found = Pass(self, message.context, content, message.options)
            content.passes[message.options] = found
        return found

    # Passes.

    def backward(self, context: int, options: Options, roots: Sequence[Node]) -> None:
        """Begin a pass; `World.ended` says when it ends."""
        content = self.contexts.get(context)
        assert content is not None
        backward = content.passes[options] = Pass(self, context, content, options, roots)

        def ended(error: str) -> None:
            if error:
                self.abort(context, backward, error)
            self.world.ended(context, options, error)

        def delivered(waiting: Waiting, error: str) -> None:
            idle = {worker: count for worker, count in waiting.items() if count}
            ended(error or (f"not all is used: {idle}" if idle else ""))

        def known(waiting: Waiting, error: str) -> None:
            if error:
                ended(error)
            else:
                backward.begin()
                backward.deliver(ROOT, dict.fromkeys(range(len(roots)), 1), delivered)

        if backward.decide() or options.fast:
            backward.deliver(ROOT, dict.fromkeys(range(len(roots)), 1), delivered)
        else:
            backward.survey(known)

    def abort(self, context: int, backward: Pass, reason: str) -> None:
        """End a pass here, and tell everybody who may take part in it, once."""
        backward.fail(reason)
        if not backward.announced:
            backward.announced = True
            for peer in self.contexts.told(context):
                self._send(peer, Abort(context, backward.options, reason))

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
        ended = self.contexts.end(context)
        assert ended is not None
        self._drop(context, *ended)

    def _release(self, context: int, floor: int) -> None:
        dropped = self.contexts.released(context, floor)
        if dropped is not None:
            self._drop(context, dropped, floor)

    def _drop(self, context: int, dropped: Dropped[Content], floor: int) -> None:
        for backward in list(dropped.content.passes.values()):
            backward.fail("the context ended")
        for peer in dropped.told:
            self._send(peer, Released(context, floor))

    def lose(self, peer: int) -> None:
        """Declare a peer dead."""
        self.lost.add(peer)
        for call in [call for call, (to, _) in self._calls.items() if to == peer]:
            if call in self._calls:
                self._fail_call(call)
        self._lose_contexts(peer)

    def _lose_contexts(self, peer: int) -> None:
        given = self.contexts.lost(peer)
        made = self.contexts.made_by(peer)
        for context in made:
            self._release(context, floor=1)
        for context in given:
            creator = context >> CREATOR_SHIFT
            if creator in self.lost:
                self._release(context, floor=1)
            else:
                self._send(creator, Holds(context))

    def _send(self, peer: int, message: Any) -> None:
        if peer not in self.lost:
            self.world.send(self.id, peer, message, 0)
