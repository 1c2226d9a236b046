"""One backward pass at one worker, in a running agent: executes what `protocol.passes` says.

The machine there knows the rules, and nothing of torch. Here the graph is explored and run, and
messages are sent: gradients in messages of their own, each with credit of the pass.

Sources that share no node are run each by the thread that brings its gradient. Otherwise one thread
of the executor runs the graph of all of them, and sleeps where it needs a gradient that is not here
yet (see `graph.run_shared`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from farcall.autograd import context_state, graph, handlers
from farcall.autograd.context_state import Context
from farcall.autograd.ending import Dropped, Ending, unused
from farcall.autograd.graph import GraphReach
from farcall.autograd.handlers import PassOptions
from farcall.autograd.nodes import ReceivedTensors, SentTensors, with_grad
from farcall.autograd.ports import PassHome
from farcall.autograd.shared_run import SharedRun
from farcall.protocol import pass_instructions as do
from farcall.protocol.passes import SURVEY, PassMachine, PassState, UnexpectedGradient
from farcall.runtime.calls.future import Future
from farcall.runtime.context import CallContext, reset_context, set_context, waiting
from farcall.runtime.membership.peers import Peer
from farcall.runtime.threads.function_queue import DEEPEST
from farcall.serde import StoredError
from farcall.transport.base import Link

Tensor = torch.Tensor
Gradients = Mapping[int, Tensor | None]  # of the tensors of a source, by their indices
Found = Mapping[Node, Tensor | None]  # gradients, by the recv nodes that they are of
Todo = list[do.Instruction]
Asker = Future[None]  # what waits for an answer to PREPARE or SURVEY
FAST_PATIENCE = 0.8  # of the timeout: how long a run waits for a gradient that may never come


class Pass:
    """See the module's description. Thread-safe.

    Args:
        runner: of this worker.
        context: that the pass is part of.
        options: of the pass.
        roots: at the worker that begins the pass.

    Attributes:
        ending: at that worker, how its user hears of the end.
        links: by which gradients went.
    """

    def __init__(
        self,
        runner: PassHome,
        context: Context,
        options: PassOptions,
        roots: SentTensors | None = None,
    ) -> None:
        self.options = options
        self.ending = None if roots is None else Ending()
        self.links: set[Link] = set()
        self._runner = runner
        self._agent = runner.agent
        self._context = context
        self._roots = roots
        self._lock = threading.Lock()
        self._arrival: threading.Condition | None = None  # when a run has to wait for gradients
        # Leaves' gradients, if other processes have replicas of some: until all are computed.
        is_replica = runner.replicas.involved(context)
        self._held: context_state.Gradients | None = {} if is_replica else None
        averages = self._held is not None
        self._machine = PassMachine(
            self._agent.me.name, options.root, is_fast=options.fast, averages=averages
        )
        # By number: those that are live, or have gradients.
        self._sources: dict[int, SentTensors] = {}
        self._all: GraphReach | None = None  # what all that was sent leads to, used or not
        self._of_roots: GraphReach | None = None  # what the roots lead to
        self._gradients: dict[int, Gradients] = {}
        self._taken: set[int] = set()

    @cached_property
    def _live(self) -> GraphReach:
        """Return the used tensors of those sent that lead anywhere."""
        return GraphReach(self._context.receives)

    @property
    def error(self) -> StoredError | Dropped | None:
        """The error that the pass failed with."""
        error: StoredError | Dropped | None = self._machine.error
        return error

    @property
    def is_announced(self) -> bool:
        """Return whether it was told to others that the pass has failed."""
        return self._machine.is_announced

    @property
    def _name(self) -> tuple[int, tuple[Any, ...]]:
        """The name by which other workers know the pass."""
        return self._context.id, tuple(self.options)

    # The machine.

    def _report(self, event: Callable[..., Todo], *what: Any) -> None:
        """Tell the machine of an event, and do what it says."""
        try:
            with self._lock:
                todo = event(*what)
                if self._arrival is not None:
                    self._arrival.notify_all()
        except UnexpectedGradient as error:
            self.fail(error)
        else:
            self._carry_out(todo)

    def _carry_out(self, todo: Iterable[do.Instruction]) -> None:
        """Carry out instructions. The caller must not hold the lock."""
        for instruction in todo:
            # Instructions of every pass come first, and by `isinstance`: a `match` takes longer.
            if isinstance(instruction, do.RunSource):
                self._run(instruction.source)
            elif isinstance(instruction, do.ReturnCredit):
                credit, missing = instruction
                self._runner.give_back(self._context, self.options, credit, missing)
            elif isinstance(instruction, do.EndPass):
                if self.ending is not None:
                    self.ending.end(instruction.error)
            else:
                self._carry_out_rare(instruction)

    def _carry_out_rare(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.RunTogether(sources=sources):
                self._agent.executor.submit(partial(self._run_shared, sources))
            case do.AskPart(part=part):
                self._ask_part(part)
            case do.AskRoot():
                self._call(self.options.root, handlers.survey, self._name, self._begin)
            case do.AnswerAsker(asker=asker, error=error):
                if error is None:
                    asker.set_result(None)
                else:
                    asker.set_exception(error.error())
            case do.ExploreRoots():
                assert self._roots is not None
                self._explore_part(self._roots, range(len(self._roots.edges)), SURVEY)
            case do.AverageLeaves(source=source):
                self._average(source)
            case do.FailUnused(missing=counts):
                self.fail(unused(counts))
            case do.StopPass():
                self._let_go()
            case do.TellRoot():
                self._runner.tell_root(self._context.id, self.options)
            case do.AskCause(peer=peer):
                name = self._context.id, self.options.id
                self._call(peer, handlers.cause, name, lambda: None)
            case do.TellAll():
                self._runner.tell_all(self._context.id, self)

    def _call(
        self, worker: str, function: Callable[..., Any], what: Any, then: Callable[[], None]
    ) -> None:
        """Call one of the `handlers` elsewhere. If that fails, so does the pass."""

        def on_answer(future: torch.futures.Future[None]) -> None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
            else:
                then()

        try:
            future = self._agent.call_async(worker, function, what)
        except BaseException as error:
            self.fail(error)
        else:
            future.add_done_callback(on_answer)

    # Which sources are live.

    def start(self) -> None:
        """Wait, at the root, until gradients may come."""
        self._explore()
        if self._machine.needs_survey:
            self.survey().wait()
            self._begin()

    def _explore(self) -> None:
        """Find out, once, whether sources can be run without knowing the others."""
        if self._machine.state is not PassState.NEW:
            return
        roots = [] if self._roots is None else [self._roots]
        if not self.options.fast:
            everything, of_roots, is_shared = self._context.reach(self._roots)
            has_sent = self._held is None or bool(self._context.sources())
            with self._lock:
                if self.error is None and self._machine.state is PassState.NEW:
                    self._all, self._of_roots = everything, of_roots
                self._machine.explored(is_shared, has_sent=has_sent)
            return
        sources = [*self._context.sources(), *roots]
        with self._lock:
            if self._machine.state is PassState.NEW:
                self._sources = {source.number: source for source in sources}
                reached = {
                    source.number: self._live.explore(source, range(len(source.edges)))
                    for source in sources
                }
                self._machine.explored_all(self._live.is_shared, reached)

    def _begin(self) -> None:
        """Begin the pass: the live sources are known."""
        self._report(lambda: self._machine.begin(self._live.is_shared))

    def survey(self) -> Asker:
        """Find out everywhere, at the root, which sources are live. Return a future of that."""
        asker: Asker = Future()
        self._report(self._machine.survey, asker)
        return asker

    def prepare(self, source: SentTensors, live: Sequence[int]) -> Asker:
        """Prepare a live source. The future ends when everything that follows is prepared.

        Args:
            live: indices of its tensors that are used.
        """
        asker: Asker = Future()
        self._explore_part(source, live, asker)
        return asker

    def _explore_part(self, source: SentTensors, live: Sequence[int], asker: object) -> None:
        with self._lock:
            parts: list[do.Part] = []
            if self.error is None:
                self._sources[source.number] = source
                parts = self._live.explore(source, live)
            todo = self._machine.reached(source.number, live, parts, asker)
        self._carry_out(todo)

    def _ask_part(self, part: do.Part) -> None:
        receive, *used = part
        if receive.peer.loss_cause is not None:
            self.fail(receive.peer.loss())
            return
        on_answer = partial(self._report, self._machine.prepared, part)
        what = (*self._name, receive.number, used)
        self._call(receive.peer.name, handlers.prepare, what, on_answer)

    # Gradients.

    def deliver(self, source: SentTensors, credit: int, gradients: Gradients) -> None:
        """Take the gradients of those tensors of a source that are used, and credit of the pass."""
        if self.options.create_graph:  # then torch's engine does not care for the caller's no_grad
            with_grad(self._deliver, source, credit, gradients)
        else:
            self._deliver(source, credit, gradients)

    def _deliver(self, source: SentTensors, credit: int, gradients: Gradients) -> None:
        self._explore()
        self._report(self._arrive, source, credit, gradients)

    def _arrive(self, source: SentTensors, credit: int, gradients: Gradients) -> Todo:
        """Take in gradients and credit together: a run needs both. The caller holds the lock."""
        if self.error is None:
            self._sources[source.number] = source
            self._gradients[source.number] = gradients
        return self._machine.arrive(source.number, credit)

    def _alone(self, source: SentTensors, used: Gradients) -> GraphReach:
        """Return the reach of the used tensors of a source."""
        if len(used) == len(source.edges):
            known = self._of_roots if source is self._roots else self._all
            assert known is not None
            return known
        reach = GraphReach(self._context.receives)
        reach.explore(source, used)
        return reach

    def _run(self, number: int) -> None:
        """Run the graph of a source that shares no node with others."""
        machine = self._machine
        try:
            with self._lock:
                self._check()
                source, gradients = self._sources[number], self._gradients.pop(number)
                is_alone = machine.state is PassState.ALONE
                reach = self._alone(source, gradients) if is_alone else self._live
            inputs = reach.exploration.inputs[source]
            found = graph.run(source, gradients, inputs, **self._flags)
            leaving: dict[ReceivedTensors, dict[Node, Tensor | None]] = {}
            for index, input_ in enumerate(inputs):
                receive = self._context.receives.get(input_.node)
                if receive is not None:
                    leaving.setdefault(receive, {})[input_.node] = found[index]
            with self._lock:
                todo = machine.computed(number, {each: each.peer.incarnation for each in leaving})
            for instruction in todo:
                if isinstance(instruction, do.KeepLeaves):
                    self._accumulate(inputs, found)
                else:
                    receive = instruction.receive
                    self._send(receive, instruction.credit, leaving[receive])
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        else:
            self.ran(number)

    def _run_shared(self, numbers: Sequence[int]) -> None:
        """Run the graph of all sources, as their gradients come."""
        token = set_context(CallContext(self._agent, depth=DEEPEST))
        try:
            with self._lock:
                self._check()
                exploration = self._live.exploration
            run = SharedRun(self, numbers)
            self._accumulate(*graph.run_shared(exploration, run, **self._flags))
            run.finish()
            self._gradients, self._live = {}, GraphReach({})
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        finally:
            reset_context(token)

    def wait_for(self, number: int) -> Gradients:
        """Return the gradients of the live tensors of a source, when they are there."""
        limit = FAST_PATIENCE * self._agent.status.rpc_timeout if self.options.fast else 0
        with waiting(), self._lock:
            self._arrival = self._arrival or threading.Condition(self._lock)
            is_there = self._arrival.wait_for(
                lambda: number in self._gradients or self.error is not None, limit or None
            )
            self._check()
            if not is_there:
                raise unused({self._agent.me.name: self._machine.missing})
            return self._gradients[number]

    def receive_of(self, node: Node) -> ReceivedTensors | None:
        """Return the receive that a recv node belongs to, or None if the context has no such."""
        return self._context.receives.get(node)

    @property
    def _flags(self) -> dict[str, bool]:
        options = self.options
        return {"retain_graph": options.retain_graph, "create_graph": options.create_graph}

    def _accumulate(self, inputs: Sequence[GradientEdge], found: Sequence[Tensor | None]) -> None:
        """Keep the gradients that were found of those inputs that are leaves."""
        # A tensor with a graph of its own is not changed in place anyway.
        taken = None if self.options.create_graph else self._taken
        gradients = graph.of_leaves(inputs, found, taken)
        self._runner.on_leaf_gradients(gradients)
        if self._held is None:
            self._context.accumulate(gradients)
        else:
            with self._lock:
                context_state.accumulate(self._held, gradients)

    def left(self, number: int, receive: ReceivedTensors, found: Found) -> None:
        """Note, in a run of all sources up to `number`, that a recv node of a receive has run.

        Args:
            found: the gradients of recv nodes so far.
        """
        with self._lock:
            self._check()
            todo = self._machine.left(number, receive, receive.peer.incarnation)
        for send in todo:
            self._send(receive, send.credit, found)

    def _send(self, receive: ReceivedTensors, credit: int, found: Found) -> None:
        """Send the gradients of a receive to where it came from."""
        self._check()
        gradients = {
            index: found[node] for index, node in enumerate(receive.nodes) if node in found
        }
        link = self._runner.send_gradients(
            receive.peer, self._context, self.options, receive.number, credit, gradients
        )
        self.links.add(link)

    def ran(self, number: int) -> None:
        """Note that the run of a source is over."""
        self._report(self._machine.ran, number)

    def _average(self, number: int) -> None:
        """Average the gradients of replicated leaves with those of other processes."""
        try:
            fresh = dict((self._held or {}).values())
            self._runner.replicas.accumulate(self._context, fresh)
        except BaseException as error:
            self.fail(error)
            return
        with self._lock:
            self._held = {}
        self._report(self._machine.averaged, number)

    # The end.

    def credit_returned(self, peer: Peer, credit: int, missing: int) -> None:
        """Note, at the root, that a worker gave credit back."""
        self._report(self._machine.credit_returned, peer.name, credit, missing)

    def pass_failed(self, peer: Peer) -> None:
        """Note, at the root, that the pass has failed at a peer."""
        self._report(self._machine.pass_failed, peer.name)

    def on_peer_lost(self, peer: Peer) -> None:
        """Fail the pass if it needs this worker, which is gone."""
        cause = StoredError(peer.loss())
        self._report(self._machine.on_peer_lost, peer.incarnation, peer.name, cause)

    def fail(self, error: BaseException) -> None:
        """Fail the pass: an error happened, here or elsewhere."""
        if self.error is None:
            self._report(self._machine.fail, StoredError(error))
        # A Ctrl-C may have cut off earlier instructions of the machine, its EndPass among them.
        if self.ending is not None and not self.ending.is_over:
            self.ending.end(self.error or StoredError(error))

    def abort(self, error: BaseException) -> None:
        """End the pass here, since it has failed at the root, and tell all that may take part."""
        self._report(self._machine.abort, StoredError(error))

    def drop(self, why: str) -> None:
        """End the pass: its context is gone."""
        self._report(self._machine.stop, Dropped(why))

    def _let_go(self) -> None:
        """Keep nothing of the pass: it has failed."""
        with self._lock:
            kept = (self._all, self._of_roots, self._live, self._gradients, self._held)
            more = (self._roots, self._sources)
            self._all, self._of_roots, self._live, self._gradients = None, None, GraphReach({}), {}
            self._held, self._roots, self._sources = None, None, {}
        del kept, more  # not under the lock: destructors of their values may be the user's

    def _check(self) -> None:
        if self._machine.error is not None:
            raise self._machine.error.error()
