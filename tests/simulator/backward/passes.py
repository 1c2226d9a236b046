"""One backward pass at a simulated worker: executes what `farcall.protocol.passes` says.

The counterpart of `farcall.autograd.passes`. Its nodes only add up whole numbers. Each node is a
step of a run; between two steps anything else may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from farcall.protocol import pass_instructions as do
from farcall.protocol.contexts import Contexts
from farcall.protocol.credit import WHOLE
from farcall.protocol.passes import ROOT, SURVEY, PassState, UnexpectedGradient
from simulator.backward.history import Leaf, Node, ReceivedNodes, SentNodes
from simulator.backward.machines import Machines
from simulator.backward.messages import Abort, AboutPass, Answered, Grad, Options, Prepare
from simulator.backward.reach import SimulatedReach, Sums
from simulator.backward.world import Run, World

OnAnswer = Callable[[str], None]  # the error, if there is one
T = TypeVar("T")


class PassHome(Protocol):
    """The part of a worker that a pass uses."""

    id: int
    machines: Machines
    world: World
    lost_peers: set[int]

    @property
    def contexts(self) -> Contexts[Any]: ...

    def send(self, peer: int, message: Any) -> None:
        """Send something that is not answered."""

    def call(self, peer: int, message: Any, on_answer: Callable[[Answered], None]) -> None:
        """Send something that is answered, or fails."""

    def carry_out(self, todo: Sequence[T], do: Callable[[T], None]) -> None:
        """Do what a machine said."""


class Content:
    """A context at one worker.

    Attributes:
        sends: by number, the nodes of the tensors that were sent.
        receives: by the nodes of their tensors.
        averages: whether other processes have replicas of the leaves.
        passes: by their options.
    """

    def __init__(
        self,
        sends: dict[int, list[Node]],
        receives: Mapping[Node, ReceivedNodes],
        *,
        averages: bool = False,
    ) -> None:
        self.sends = sends
        self.receives = receives
        self.averages = averages
        self.passes: dict[Options, SimulatedPass] = {}


class SimulatedPass:
    """One pass at one worker. `roots` are those of the pass, at the worker that began it."""

    def __init__(
        self,
        worker: PassHome,
        context: int,
        content: Content,
        options: Options,
        roots: Sequence[Node] = (),
    ) -> None:
        self.options = options
        self.machine = worker.machines.passes(
            worker.id, options.root, is_fast=options.fast, averages=content.averages
        )
        self._roots = roots
        self._worker = worker
        self._world = worker.world
        self._context = context
        self._content = content
        self._new_reach = worker.machines.reach
        self._sources: dict[int, SentNodes] = {}
        self._live = self._new_reach(content.receives)
        self._gradients: dict[int, Mapping[int, int]] = {}
        # Gradients of leaves, until all are there; None: they were averaged.
        self._held: list[tuple[Node, int]] | None = []
        self._runs = 0

    @property
    def error(self) -> str:
        """The error that the pass failed with."""
        return self.machine.error or ""

    @property
    def is_idle(self) -> bool:
        """Return whether this worker has nothing to do, and none waits for it."""
        return not (self.machine.is_asked or self._runs)

    # The machine.

    def report(self, event: Callable[..., list[do.Instruction]], *what: Any) -> None:
        """Tell the machine of an event, and do what it says."""
        try:
            todo = event(*what)
        except UnexpectedGradient as error:
            todo = self.machine.fail(f"UnexpectedGradient: {error}")
        self._worker.carry_out(todo, self._do)

    def _do(self, instruction: do.Instruction) -> None:
        worker, name = self._worker, (self._context, self.options)
        match instruction:
            case do.ExploreRoots():
                self._explore_part(ROOT, range(len(self._roots)), SURVEY)
            case do.AskPart(part=part):
                receive, *used = part
                then = partial(self.report, self.machine.prepared, part)
                self._call(receive.sender, Prepare(receive.number, tuple(used)), then)
            case do.AskRoot():
                self._call(self.options.root, instruction, self._begin)
            case do.AnswerAsker(asker=asker, error=error):
                asker(error or "")
            case do.RunSource(source=source):
                reach = self._part(source) if self._is_alone else self._live
                self._start(self._run_alone(source, reach))
            case do.RunTogether(sources=sources):
                self._start(self._run_shared(sources))
            case do.AverageLeaves(source=source):
                assert self._held is not None, "averaged twice"
                for leaf, gradient in self._held:
                    self._world.accumulated(*name, leaf, gradient)
                self._held = None
                self.report(self.machine.averaged, source)
            case do.ReturnCredit() | do.TellRoot():
                worker.send(self.options.root, AboutPass(*name, instruction))
            case do.FailUnused(missing=missing):
                self.fail(_unused(missing))
            case do.EndPass(error=error):
                self._world.ended(*name, error or "")
                if error:
                    self.report(self.machine.abort, error)
            case do.AskCause(peer=peer):
                self._call(peer, instruction, lambda: None)
            case do.TellAll():
                for peer in worker.contexts.known_to(self._context):
                    worker.send(peer, AboutPass(*name, Abort(self.error)))

    def _call(self, peer: int, what: Any, then: Callable[[], None]) -> None:
        def on_answer(answer: Answered) -> None:
            if answer.error:
                self.fail(answer.error)
            else:
                then()

        self._worker.call(peer, AboutPass(self._context, self.options, what), on_answer)

    def fail(self, error: str) -> None:
        """Fail the pass: an error happened, here or elsewhere."""
        self.report(self.machine.fail, error)

    # Which sources are live.

    def start(self) -> None:
        """Deliver, at the root, the gradients of the roots as soon as they may come."""

        def deliver(error: str = "") -> None:
            if not error:
                self._begin()
                self.deliver(ROOT, dict.fromkeys(range(len(self._roots)), 1), WHOLE)

        self._explore()
        if self.machine.needs_survey:
            self.report(self.machine.survey, deliver)
        else:
            deliver()

    def _source(self, number: int) -> SentNodes:
        nodes = self._roots if number == ROOT else self._content.sends[number]
        return self._sources.setdefault(number, SentNodes(number, nodes))

    def _explore(self) -> None:
        if self.machine.state is not PassState.NEW:
            return
        reach = self._live if self.options.fast else self._new_reach(self._content.receives)
        numbers = [*self._content.sends, *([ROOT] if self._roots else [])]
        sources = [self._source(number) for number in numbers]
        reached = {
            source.number: reach.explore(source, range(len(source.edges))) for source in sources
        }
        for _ in range(2):  # two threads may find it out
            if self.options.fast:
                self.machine.explored_all(reach.is_shared, reached)
            else:
                self.machine.explored(reach.is_shared, has_sent=bool(self._content.sends))

    def _begin(self) -> None:
        self.report(self.machine.begin, self._live.is_shared)

    def prepare(self, source: int, live: Sequence[int], answer: OnAnswer) -> None:
        """Explore a part of a source that is live."""
        self._explore_part(source, live, answer)

    def _explore_part(self, source: int, live: Sequence[int], asker: object) -> None:
        parts = self._live.explore(self._source(source), live)
        todo = self.machine.reached(source, live, parts, asker)
        self._worker.carry_out(todo, self._do)

    # Gradients.

    def deliver(self, source: int, gradients: Mapping[int, int], credit: int) -> None:
        """Take in the gradients of a source, and credit of the pass."""
        self._explore()
        self._gradients[source] = gradients
        self.report(self.machine.arrive, source, credit)

    @property
    def _is_alone(self) -> bool:
        return self.machine.state is PassState.ALONE

    def _part(self, source: int) -> SimulatedReach:
        """Return the reach of the used tensors of a source."""
        reach = self._new_reach(self._content.receives)
        reach.explore(self._source(source), list(self._gradients[source]))
        return reach

    def _start(self, run: Run) -> None:
        self._runs += 1
        self._world.start(self._worker.id, run, self._expire)

    def _expire(self) -> None:
        """Give up a run that has waited too long; in fast mode, a gradient may never come."""
        if self.options.fast:
            self.fail(_unused({self._worker.id: self.machine.missing}))

    def _run_alone(self, source: int, reach: SimulatedReach) -> Run:
        """Run the graph of a source that shares no node with others; a step for each node."""
        found: dict[Node, int] = {}
        sums = Sums([node for _, node in self._entries(source, reach)])
        if not (yield from self._walk(source, reach, sums, found.__setitem__)):
            return
        receives = {node.receive: node.receive.sender for node in found if node.receive is not None}
        for count, instruction in enumerate(self.machine.computed(source, receives)):
            if count:
                yield True
            if self.error:
                return
            match instruction:
                case do.KeepLeaves():
                    self._accumulate(found)
                case do.SendGradients(receive=receive, credit=credit):
                    self._send(receive, credit, found)
        if self._content.averages:  # then something is left to do
            yield True
            if self.error:
                return
        self._runs -= 1
        self.report(self.machine.ran, source)

    def _run_shared(self, sources: Sequence[int]) -> Run:
        """Run the graph of all sources, as their gradients come; a step for each node."""
        found: dict[Node, int] = {}
        reach = self._live
        sums = Sums([node for source in sources for _, node in self._entries(source, reach)])

        def exit(source: int, node: Node, gradient: int) -> None:
            found[node] = gradient
            receive = node.receive
            if receive is not None:
                for send in self.machine.left(source, receive, receive.sender):
                    self._send(receive, send.credit, found)

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
            self.report(self.machine.ran, source)
            yield True
            if self.error:
                return

    def _walk(
        self, source: int, reach: SimulatedReach, sums: Sums, done: Callable[[Node, int], None]
    ) -> Generator[bool, None, bool]:
        """Run what the gradients of a source complete; return False if the pass has failed."""
        ready = []
        for index, node in self._entries(source, reach):
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
            for child, factor in node.next_functions:
                ready += sums.give(child, factor * gradient)
        return not self.error

    def _entries(self, number: int, reach: SimulatedReach) -> list[tuple[int, Node]]:
        """Return the tensors of a source that are used, by their indices."""
        source = self._source(number)
        return [(index, source.edges[index].node) for index in reach.exploration.live[source]]

    def _accumulate(self, found: Mapping[Node, int]) -> None:
        """Keep the gradients of those nodes that are leaves."""
        leaves = [(node, gradient) for node, gradient in found.items() if isinstance(node, Leaf)]
        if self._content.averages:
            assert self._held is not None, "a gradient came after averaging"
            self._held += leaves
            return
        for leaf, gradient in leaves:
            self._world.accumulated(self._context, self.options, leaf, gradient)

    def _send(self, receive: ReceivedNodes, credit: int, found: Mapping[Node, int]) -> None:
        """Send the gradients of a receive to where it came from."""
        peer = receive.sender
        if peer in self._worker.lost_peers:
            self.fail(f"lost {peer}")
        if self.error:
            return
        self._world.sent(self._context, self.options, receive)
        used = ((index, node) for index, node in enumerate(receive.nodes) if node in found)
        gradients = tuple((index, found[node]) for index, node in used)
        grad = Grad(receive.number, credit, gradients)
        self._worker.send(peer, AboutPass(self._context, self.options, grad))


def _unused(missing: Mapping[int, int]) -> str:
    return f"not all is used: {dict(missing)}"
