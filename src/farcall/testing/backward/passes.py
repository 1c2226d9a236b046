"""One backward pass at a simulated worker: the pure counterpart of `farcall.autograd.passes`.

Its nodes only add up whole numbers. Rules that `Backward` relies on, all of them here:

- A received tensor that several sources reach gets its gradient when all of them have theirs.
- Where no two sources could share a node, each is run when its gradient comes. Elsewhere the worker
  first has the root find out which sources are live; if they do share nodes, they are run together,
  and the run waits for them in descending order.
- Who fails, tells all whose answers it owes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from farcall.protocol.backward import ROOT, UnexpectedGradient
from farcall.testing.backward.history import Node, Receive
from farcall.testing.backward.messages import Answer, Grad, Options, Prepare, Survey, Waiting

if TYPE_CHECKING:
    from farcall.testing.backward.worker import Worker

OnAnswer = Callable[[Waiting, str], None]  # what is known of waiting sources, or the error
Run = Iterator[bool]  # whether a step was done; else it waits for a gradient


class World(Protocol):
    """What a worker can do, and whom it tells."""

    def send(self, worker: int, peer: int, message: Any, call: int) -> None:
        """A message goes off; `call` is 0 if it wants no answer."""

    def start(self, worker: int, run: Run) -> None:
        """A run begins."""

    def ran(self, context: int, options: Options, node: Node) -> None:
        """A node is run."""

    def accumulated(self, context: int, options: Options, leaf: Node, gradient: int) -> None:
        """A leaf gets a gradient."""

    def sent(self, context: int, options: Options, receive: Receive) -> None:
        """The gradients of a receive go off."""

    def ended(self, context: int, options: Options, error: str) -> None:
        """A pass that began here has ended."""


class Content:
    """A context at one worker."""

    def __init__(self, sends: dict[int, list[Node]]) -> None:
        self.sends = sends
        self.passes: dict[Options, Pass] = {}


class Reach:
    """What sources reach.

    Attributes:
        entries: of each source: the indices of its tensors, and their nodes.
        received: the tensors of each receive that are reached, and by which source.
        is_shared: whether some node, or some message, waits for several sources.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, Node]]] = {}
        self.received: dict[Receive, dict[Node, int]] = {}
        self.is_shared = False
        self._seen: dict[Node, int] = {}

    def explore(
        self, source: int, nodes: Sequence[Node], live: Iterable[int]
    ) -> list[tuple[Any, ...]]:
        """Parts of a source: the parts of receives that are reached now, as the first.

        A part is a receive, and indices of its tensors.
        """
        entries = [(index, nodes[index]) for index in live]
        self.entries.setdefault(source, []).extend(entries)
        found: dict[Receive, list[int]] = {}
        stack = [node for _, node in entries]
        while stack:
            node = stack.pop()
            if node.is_leaf:  # may get its gradient in parts
                continue
            first = self._seen.get(node)
            if first is not None:
                self.is_shared |= first != source
                continue
            self._seen[node] = source
            if node.receive is not None:
                found.setdefault(node.receive, []).append(node.receive.nodes.index(node))
                sources = self.received.setdefault(node.receive, {})
                sources[node] = source
                self.is_shared |= len(set(sources.values())) > 1
            stack += [child for child, _ in node.children]
        return [(receive, *used) for receive, used in found.items()]


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
        self.announced = False
        self.machine = worker.machines.backward()
        self._worker = worker
        self._world = worker.world
        self._context = context
        self._content = content
        self._is_alone: bool | None = None
        self._all = Reach()
        self._live = Reach()
        self._survey: list[OnAnswer] | None = None
        self._surveyed = False
        self._early: list[int] = []
        self._gradients: dict[int, dict[int, int]] = {}
        self._answers: dict[Any, OnAnswer] = {}
        self._waiting: Waiting = {}

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for this worker."""
        return not self._answers

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
            answer({}, self.error)
            return
        if self._survey is not None:
            self._survey.append(answer)
            return
        self._survey = [answer]

        def prepared(waiting: Waiting, error: str) -> None:
            self._surveyed = not error
            for waiter in self._survey or ():
                waiter({}, error)

        self.prepare(ROOT, range(len(self.roots)), prepared)

    def prepare(self, source: int, live: Sequence[int], answer: OnAnswer) -> None:
        """A part of a source is live."""
        if self.error:
            answer({}, self.error)
            return
        part = (source, *live)
        parts = self._live.explore(source, self._nodes(source), live)
        self.machine.reach(source, part, parts)
        if not parts:
            answer({}, "")
            return
        self._answers[part] = answer
        for reached in parts:
            receive, *used = reached
            message = Prepare(self._context, self.options, receive.number, tuple(used))
            self._call(receive.sender, message, self.machine.prepared, reached)

    def begin(self) -> None:
        """The live sources are known: run what they share."""
        if self.error or self.machine.has_begun:
            return
        sources = self.machine.begin()
        early, self._early = self._early, []
        for source in early:
            self.machine.arrive(source)
        if self._live.is_shared:
            self._start(self._run(sources, self._live))
        else:
            for source in early:
                self._start(self._run([source], self._live))

    def _ask_root(self) -> None:
        def on_answer(answer: Answer) -> None:
            if answer.error:
                self.fail(answer.error)
            else:
                self.begin()

        message = Survey(self._context, self.options)
        self._worker.call(self.options.root, message, on_answer)

    # Gradients.

    def deliver(
        self,
        source: int,
        gradients: dict[int, int],
        answer: OnAnswer,
    ) -> None:
        """The gradients of a source."""
        if self.error:
            answer({}, self.error)
            return
        self._gradients[source] = gradients
        if self._is_alone is None:
            self.decide()
        is_known = self._is_alone or self.machine.has_begun
        is_first = not (is_known or self._early)
        if is_known:
            try:
                self.machine.arrive(source)
            except UnexpectedGradient as error:
                answer({}, f"UnexpectedGradient: {error}")
                return
        else:
            self._early.append(source)
        self._answers[source] = answer
        if self._is_alone:
            self._start(self._run([source], self._part(source)))
        elif is_known and not self._live.is_shared:
            self._start(self._run([source], self._live))
        elif is_first and self.options.fast:
            self.begin()
        elif is_first:
            self._ask_root()

    def _part(self, source: int) -> Reach:
        """What the used tensors of a source lead to."""
        reach = Reach()
        reach.explore(source, self._nodes(source), self._gradients[source])
        return reach

    def _start(self, run: Run) -> None:
        self._world.start(self._worker.id, run)

    def _run(self, sources: Sequence[int], reach: Reach) -> Run:
        """Run the graph of these sources, as their gradients come; a step for each node."""
        left = self._uses([node for source in sources for _, node in reach.entries[source]])
        totals: dict[Node, int] = dict.fromkeys(left, 0)
        arrived: dict[Node, int] = {}
        for source in sources:
            while source not in self._gradients:
                yield False
                if self.error:
                    return
            ready = []
            for index, node in reach.entries[source]:
                gradient = self._gradients[source].get(index, 0)  # 0 in fast mode: it is not used
                ready += self._give(node, gradient, totals, left)
            while ready:
                yield True
                if self.error:
                    return
                node = ready.pop()
                if node.raises:
                    self.fail(f"{node} raised")
                    return
                self._world.ran(self._context, self.options, node)
                if node.is_leaf:
                    self._world.accumulated(self._context, self.options, node, totals[node])
                if node.receive is not None:
                    arrived[node] = totals[node]
                    if arrived.keys() >= reach.received[node.receive].keys():
                        self._send(source, node.receive, arrived)
                for child, factor in node.children:
                    ready += self._give(child, factor * totals[node], totals, left)
            self._ran(source)
            yield True

    def _uses(self, entries: Sequence[Node]) -> dict[Node, int]:
        """How many gradients each node gets, in a run from these."""
        uses: dict[Node, int] = {}
        stack = list(entries)
        while stack:
            node = stack.pop()
            uses[node] = uses.get(node, 0) + 1
            if uses[node] == 1:
                stack += [child for child, _ in node.children]
        return uses

    def _give(
        self, node: Node, gradient: int, totals: dict[Node, int], left: dict[Node, int]
    ) -> list[Node]:
        """Add to the gradient of a node; itself, when that is complete."""
        totals[node] += gradient
        left[node] -= 1
        return [] if left[node] else [node]

    def _send(self, source: int, receive: Receive, found: dict[Node, int]) -> None:
        self.machine.send(source, receive)
        self._world.sent(self._context, self.options, receive)
        used = ((index, node) for index, node in enumerate(receive.nodes) if node in found)
        gradients = tuple((index, found[node]) for index, node in used)
        message = Grad(self._context, self.options, receive.number, gradients)
        self._call(receive.sender, message, self.machine.answered, receive)

    def _ran(self, source: int) -> None:
        if not self.error and self.machine.ran(source):
            self._settle(source)

    # Answers.

    def _call(self, peer: int, message: Any, settle: Callable[[Any], Any], sent: Any) -> None:
        def on_answer(answer: Answer) -> None:
            if answer.error:
                self.fail(answer.error)
            elif not self.error:
                self._note(answer.waiting)
                self._settle(settle(sent))

        self._worker.call(peer, message, on_answer)

    def _settle(self, came: Any) -> None:
        answer = None if came is None else self._answers.pop(came, None)
        if answer is not None:
            if self.options.fast:
                self._note({self._worker.id: self.machine.missing})
            answer(dict(self._waiting), "")

    def _note(self, waiting: Waiting) -> None:
        for worker, count in waiting.items():
            self._waiting[worker] = min(count, self._waiting.get(worker, count))

    def fail(self, error: str) -> None:
        """Something went wrong: nothing more is done, and who waits is told."""
        if self.error:
            return
        self.error = error
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer({}, error)
