"""One backward pass at a simulated worker: the pure counterpart of `farcall.autograd.passes`.

Its nodes only add up whole numbers. Rules that `Backward` relies on, all of them here:

- A received tensor that several sources reach gets its gradient when all of them have theirs.
- Where no two sources could share a node, each is run when its gradient comes. Elsewhere the worker
  first has the root find out which sources are live; if they do share nodes, they are run together,
  and the run waits for them in descending order.
- Gradients of leaves are kept before the last share of their source goes away.
- Where a pass fails, the root is told (Broken), and asks for the reason (Cause). Whom a gradient
  was sent to is remembered: if that worker is lost, the pass fails.

Why every death of a worker that holds a share is noticed: it was given the share with a gradient,
by a worker that was given its own in the same way, and so on back to the root. Let the root be
alive, and look at the first dead worker of that chain. The one before it is alive, knows that it
sent a gradient there, and has a link to it. So it finds out, and fails; what it tells the root
arrives, or it dies as well, and is the first dead one itself. A gradient on its way, or a share on
its way back, belongs to its sender: if that dies, and the message is lost with it, the same holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from farcall.protocol.backward import ROOT, UnexpectedGradient
from farcall.testing.backward.history import Node, Receive
from farcall.testing.backward.messages import (
    Answer,
    Broken,
    Cause,
    Grad,
    Options,
    Prepare,
    Ran,
    Survey,
)
from farcall.testing.backward.reach import Reach, Sums
from farcall.testing.backward.world import Run

if TYPE_CHECKING:
    from farcall.testing.backward.worker import Worker

OnAnswer = Callable[[str], None]  # the error, if there is one


class Content:
    """A context at one worker."""

    def __init__(self, sends: dict[int, list[Node]]) -> None:
        self.sends = sends
        self.passes: dict[Options, Pass] = {}


class Pass:
    """One pass at one worker. `roots` are those of the pass, at the worker that began it."""

    def __init__(
        self,
        worker: Worker,
        context: int,
        content: Content,
        options: Options,
        roots: Sequence[Node] = (),
    ) -> None:
        self.options = options
        self.roots = roots
        self.error = ""
        self.has_ended = False  # at the root
        self.announced = False
        self.machine = worker.machines.backward()
        self._worker = worker
        self._world = worker.world
        self._context = context
        self._content = content
        self._is_root = options.root == worker.id
        self._is_alone: bool | None = None
        self._all = Reach()
        self._live = Reach()
        self._survey: list[OnAnswer] | None = None
        self._surveyed = False
        self._early: list[tuple[int, int]] = []  # (source, share)
        self._gradients: dict[int, Mapping[int, int]] = {}
        self._answers: dict[Any, OnAnswer] = {}
        self._runs = 0
        self._sent_to: set[int] = set()
        self._returned = worker.machines.returned()
        self._missing: dict[int, int] = {}  # worker -> how many of its sources have no gradient

    @property
    def is_idle(self) -> bool:
        """Whether this worker has nothing to do, and nobody waits for it."""
        return not (self._answers or self._early or self._runs)

    # Which sources are live.

    def _nodes(self, source: int) -> Sequence[Node]:
        return self.roots if source == ROOT else self._content.sends[source]

    def decide(self) -> bool:
        """Whether sources can be run without knowing which others are live."""
        sources = [*self._content.sends, *([ROOT] if self.roots else [])]
        for source in sources:
            reach = self._live if self.options.fast else self._all
            reach.explore(source, self._nodes(source), range(len(self._nodes(source))))
            if self.options.fast:
                self.machine.reach(source, source, ())
        self._is_alone = not (self.options.fast or self._all.is_shared)
        return self._is_alone

    def survey(self, answer: OnAnswer) -> None:
        """At the root: find out which sources are live."""
        if self.error or self._surveyed:
            answer(self.error)
            return
        if self._survey is not None:
            self._survey.append(answer)
            return
        self._survey = [answer]

        def prepared(error: str) -> None:
            self._surveyed = not error
            for waiter in self._survey or ():
                waiter(error)

        self.prepare(ROOT, range(len(self.roots)), prepared)

    def prepare(self, source: int, live: Sequence[int], answer: OnAnswer) -> None:
        """A part of a source is live."""
        if self.error:
            answer(self.error)
            return
        part = (source, *live)
        parts = self._live.explore(source, self._nodes(source), live)
        self.machine.reach(source, part, parts)
        if not parts:
            answer("")
            return
        self._answers[part] = answer
        for reached in parts:
            receive, *used = reached
            message = Prepare(self._context, self.options, receive.number, tuple(used))
            self._worker.call(receive.sender, message, partial(self._prepared, reached))

    def _prepared(self, reached: tuple[Any, ...], answer: Answer) -> None:
        if answer.error:
            self.fail(answer.error)
        elif not self.error:
            part = self.machine.prepared(reached)
            if part is not None:
                self._answers.pop(part)("")

    def begin(self) -> None:
        """The live sources are known: run what they share."""
        if self.error or self.machine.has_begun:
            return
        sources = self.machine.begin()
        early, self._early = self._early, []
        arrived = [source for source, share in early if self._arrive(source, share)]
        if self._live.is_shared:
            self._start(self._run_shared(sources))
        else:
            for source in arrived:
                self._start(self._run_alone(source, self._live))

    def _ask_root(self) -> None:
        def on_answer(answer: Answer) -> None:
            if answer.error:
                self.fail(answer.error)
            else:
                self.begin()

        message = Survey(self._context, self.options)
        self._worker.call(self.options.root, message, on_answer)

    # Gradients.

    def deliver(self, source: int, gradients: Mapping[int, int], share: int) -> None:
        """The gradients of a source, and a share of the pass."""
        if self.error:
            return
        self._gradients[source] = gradients
        if self._is_alone is None:
            self.decide()
        if not (self._is_alone or self.machine.has_begun):
            self._early.append((source, share))
            if len(self._early) > 1:
                return  # the first one has seen to it
            if self.options.fast:
                self.begin()
            else:
                self._ask_root()
        elif self._arrive(source, share):
            if self._is_alone:
                self._start(self._run_alone(source, self._part(source)))
            elif not self._live.is_shared:
                self._start(self._run_alone(source, self._live))

    def _arrive(self, source: int, share: int) -> bool:
        try:
            self.machine.arrive(source, share)
        except UnexpectedGradient as error:
            self.fail(f"UnexpectedGradient: {error}")
            return False
        return True

    def _part(self, source: int) -> Reach:
        """What the used tensors of a source lead to."""
        reach = Reach()
        reach.explore(source, self._nodes(source), list(self._gradients[source]))
        return reach

    def _start(self, run: Run) -> None:
        self._runs += 1
        self._world.start(self._worker.id, run, self._expire)

    def _expire(self) -> None:
        """A run has waited for too long: in fast mode, for a gradient that may never come."""
        if self.options.fast:
            self.fail(_unused({self._worker.id: self.machine.missing}))

    def _run_alone(self, source: int, reach: Reach) -> Run:
        """Run the graph of a source that shares no node with others; a step for each node."""
        found: dict[Node, int] = {}
        sums = Sums([node for _, node in reach.entries[source]])
        if not (yield from self._walk(source, reach, sums, found.__setitem__)):
            return
        if not self._is_root:
            self._accumulate(found)
        receives = {node.receive: None for node in found if node.receive is not None}
        left = len(receives)
        for receive in receives:
            left -= 1
            # At the root giving back costs nothing, and in fast mode every source reports.
            is_last = not (left or self._is_root or self.options.fast)
            self._send(source, receive, found, is_last)
            if not is_last:
                yield True
            if self.error:
                return
        if self._is_root:  # what others do with the gradients does not wait for this
            self._accumulate(found)
        self._runs -= 1
        self._ran(source)

    def _run_shared(self, sources: Sequence[int]) -> Run:
        """Run the graph of all sources, as their gradients come; a step for each node."""
        found: dict[Node, int] = {}
        reach = self._live
        sums = Sums([node for source in sources for _, node in reach.entries[source]])

        def exit(source: int, node: Node, gradient: int) -> None:
            found[node] = gradient
            receive = node.receive
            if receive is not None and found.keys() >= reach.received[receive].keys():
                self._send(source, receive, found)

        for source in sources:
            while source not in self._gradients:
                yield False
                if self.error:
                    return
            if not (yield from self._walk(source, reach, sums, partial(exit, source))):
                return
            if source == sources[-1]:
                self._accumulate(found)
                self._runs -= 1
            self._ran(source)
            yield True
            if self.error:
                return

    def _walk(
        self, source: int, reach: Reach, sums: Sums, done: Callable[[Node, int], None]
    ) -> Generator[bool, None, bool]:
        """Run what the gradients of a source complete. False: the pass has failed."""
        ready = []
        for index, node in reach.entries[source]:
            gradient = self._gradients[source].get(index, 0)  # 0 in fast mode: it is not used
            ready += sums.give(node, gradient)
        while ready:
            yield True
            if self.error:
                return False
            node = ready.pop()
            if node.raises:
                self.fail(f"{node} raised")
                return False
            self._world.ran(self._context, self.options, node)
            gradient = sums.totals[node]
            done(node, gradient)
            for child, factor in node.children:
                ready += sums.give(child, factor * gradient)
        return not self.error

    def _accumulate(self, found: Mapping[Node, int]) -> None:
        """Keep the gradients of those nodes that are leaves."""
        for node, gradient in found.items():
            if node.is_leaf:
                self._world.accumulated(self._context, self.options, node, gradient)

    def _send(
        self, source: int, receive: Receive, found: Mapping[Node, int], last: bool = False
    ) -> None:
        """The gradients of a receive are complete: send them to where it came from."""
        peer = receive.sender
        self._sent_to.add(peer)
        if peer in self._worker.lost:
            self.lost(peer)
        if self.error:
            return
        share = self.machine.send(source, last)
        self._world.sent(self._context, self.options, receive)
        used = ((index, node) for index, node in enumerate(receive.nodes) if node in found)
        gradients = tuple((index, found[node]) for index, node in used)
        grad = Grad(self._context, self.options, receive.number, share, gradients)
        self._worker.send(peer, grad)

    # Shares.

    def _ran(self, source: int) -> None:
        """The run of a source is over: what is left of its share goes back to the root."""
        share = self.machine.ran(source)
        if share is None:
            return
        missing = self.machine.missing if self.options.fast else -1
        if self._is_root:
            self.take_back(self._worker.id, share, missing)
        else:
            self._worker.send(self.options.root, Ran(self._context, self.options, share, missing))

    def take_back(self, worker: int, share: int, missing: int) -> None:
        """At the root: a share that nobody works on any more."""
        if self.error or self.has_ended:
            return
        self._missing[worker] = min(missing, self._missing.get(worker, missing))
        if not self._returned.add(share):
            return
        unused = {worker: count for worker, count in self._missing.items() if count > 0}
        if unused:
            self.fail(_unused(unused))
        else:
            self.has_ended = True
            self._world.ended(self._context, self.options, "")

    # Failure.

    def lost(self, peer: int) -> None:
        """A peer is lost: what it was sent, and has not passed on, is lost with it."""
        if peer in self._sent_to:
            self.fail(f"lost {peer}")

    def broken(self, peer: int) -> None:
        """At the root: the pass has failed there. Ask why."""
        if self.error or self.has_ended:
            return

        def on_answer(answer: Answer) -> None:
            self.fail(answer.error)

        self._worker.call(peer, Cause(self._context, self.options), on_answer)

    def fail(self, error: str) -> None:
        """Something went wrong here, or at the root: it is the root that tells everybody."""
        if self.error or self.has_ended:
            return
        self.stop(error)
        if self._is_root:
            self._worker.abort(self._context, self, error)
        else:
            self._worker.send(self.options.root, Broken(self._context, self.options))

    def stop(self, error: str) -> None:
        """Nothing more is done here, and who waits is told."""
        if self.error or self.has_ended:
            return
        self.error = error
        if self._is_root:
            self._world.ended(self._context, self.options, error)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer(error)


def _unused(missing: dict[int, int]) -> str:
    return f"not all is used: {missing}"
