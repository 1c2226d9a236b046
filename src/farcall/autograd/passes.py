"""One backward pass at one worker, in a running agent: graph, messages and answers together.

`protocol.backward` says what follows from what; here it is done. PREPARE and GRAD are calls of the
handlers at the end of this module; their answers are futures, so no thread waits for one but the
one that began the pass.

Sources that share no node are run each by the thread that brings its gradient. Otherwise one thread
of the executor runs the graph of all of them, and sleeps where it needs a gradient that is not here
yet (see `graph.run_shared`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import Node

from farcall.autograd import graph
from farcall.autograd.reach import Reach
from farcall.autograd.records import Context, Receive, accumulate
from farcall.autograd.shared_run import SharedRun
from farcall.protocol.backward import ROOT, Backward
from farcall.runtime.context import CallContext, current, current_agent
from farcall.runtime.future import Future

if TYPE_CHECKING:
    from farcall.autograd.recorder import Autograd

Tensor = torch.Tensor
Waiting = dict[str, int]  # worker -> how many of its sources wait for their gradient
FAST_PATIENCE = 0.8  # of the timeout: how long a run waits for a gradient that may never come
REPLICAS = object()  # stands for the gradients of replicated leaves, which other processes average


class Options(NamedTuple):
    """What was asked for at the root; the same at all workers of a pass."""

    id: int
    retain_graph: bool
    create_graph: bool
    fast: bool
    root: str  # name of the worker that began the pass


class Pass:
    """See the module's description. Thread-safe.

    Args:
        autograd: of this worker.
        context: that the pass is part of.
        options: of the pass.
    """

    def __init__(self, autograd: Autograd, context: Context, options: Options) -> None:
        self.options = options
        self.error: BaseException | None = None
        self.sources: list[int] = []  # when known: those that are live, the latest first
        self._autograd = autograd
        self._agent = autograd.agent
        self._context = context
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._machine = Backward()
        self._roots: Sequence[Tensor] = ()  # their entries
        self._is_alone: bool | None = None  # whether sources can be run without knowing the others
        self._all = Reach(context)  # what all that was sent leads to, whether or not it is used
        self._live = Reach(context)  # what is used
        self._survey: Future[Waiting] | None = None
        self._early: list[int] = []  # sources whose gradients came before the live ones are known
        self._gradients: dict[int, dict[int, Tensor | None]] = {}
        self._answers: dict[Hashable, Future[Waiting]] = {}
        self._waiting: Waiting = {}
        self._taken: set[int] = set()
        self._is_announced = False
        # What is computed, if other processes have replicas of some leaves: until all of it is.
        self._held: dict[Tensor, Tensor] | None = None
        if autograd.replicas.involved(context):
            self._held = {}

    # Which sources are live.

    def start(self, roots: Sequence[Tensor]) -> None:
        """At the root: begin with these entries, and wait until their gradients may come."""
        with self._lock:
            self._roots = roots
            self._decide()
            asks = not (self._is_alone or self.options.fast)
        if asks:
            self.survey().wait()
            self._begin()

    def _decide(self) -> None:
        """Must the live sources be known before anything is run? Lock held."""
        if self.options.fast:
            for source, entries in self._candidates():
                self._live.explore(source, entries, range(len(entries)))
                self._machine.reach(source, source, ())
            self._is_alone = False
            return
        for source, entries in self._candidates():
            self._all.explore(source, entries, range(len(entries)))
        self._is_alone = not self._all.is_shared and self._held is None

    def _candidates(self) -> list[tuple[int, Sequence[Tensor]]]:
        sends: list[tuple[int, Sequence[Tensor]]] = list(self._context.sends.items())
        return [*sends, (ROOT, self._roots)] if self._roots else sends

    def _begin(self) -> None:
        """The live sources are known: run what they share. Not with the lock held."""
        with self._lock:
            if self.error is not None or self._machine.has_begun:
                return
            self.sources = self._machine.begin()
            live, early, self._early = self._live, self._early, []
            for source in early:
                self._machine.arrive(source)
        if live.is_shared:
            self._agent.executor.submit(lambda: self._run_shared(live.exploration))
        else:
            for source in early:
                self._run(source, live.exploration)

    def survey(self) -> Future[Waiting]:
        """At the root: find out everywhere which sources are live. A future of when it is done."""
        with self._lock:
            self._check()
            if self._survey is not None:
                return self._survey
            survey = self._survey = Future()
        prepared = self.prepare(ROOT, self._roots, range(len(self._roots)))
        if prepared is None:
            survey.set_result({})
        else:
            prepared.add_done_callback(lambda done: _pass_on(done, survey))
        return survey

    def prepare(
        self, source: int, entries: Sequence[Tensor], live: Sequence[int]
    ) -> Future[Waiting] | None:
        """A source is live. A future of when everything that follows is prepared; None: it is.

        Args:
            entries: of the source.
            live: indices of those that are used.
        """
        with self._lock:
            self._check()
            part = (source, *live)
            parts = self._live.explore(source, entries, live)
            self._machine.reach(source, part, parts)
            answer = self._answer_later(part) if parts else None
        for receive, *used in parts:
            self._call(receive, prepare, used, self._machine.prepared, (receive, *used))
        return answer

    def _ask_root(self) -> None:
        """Have the root find out which sources are live."""

        def on_answer(future: torch.futures.Future[Waiting]) -> None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
            else:
                self._begin()

        try:
            call = (self._context.id, tuple(self.options))
            future = self._agent.call_async(self.options.root, survey, call)
        except BaseException as error:
            self.fail(error)
        else:
            future.add_done_callback(on_answer)

    # Gradients.

    def deliver(
        self, source: int, gradients: Mapping[int, Tensor | None]
    ) -> Future[Waiting] | None:
        """The gradients of a source. A future of when all that follows is done; None: it is.

        Args:
            gradients: of those tensors that are used, by their indices.
        """
        with self._lock:
            self._check()
            answer = self._answer_later(source)
            self._gradients[source] = dict(gradients)
            if self._is_alone is None:
                self._decide()
            reach = self._alone(source) if self._is_alone else self._live
            is_known = self._is_alone or self._machine.has_begun
            is_first = not (is_known or self._early)
            if is_known:
                self._machine.arrive(source)
                self._arrival.notify_all()
            else:
                self._early.append(source)
        if is_known and not reach.is_shared:
            self._run(source, reach.exploration)
        elif is_first and self.options.fast:
            self._begin()
        elif is_first:
            self._ask_root()
        return None if answer.done() and self.error is None else answer

    def _alone(self, source: int) -> Reach:
        """What the used tensors of a source lead to."""
        entries = self._roots if source == ROOT else self._context.sends[source]
        used = self._gradients[source]
        if len(used) == len(entries):
            return self._all
        reach = Reach(self._context)
        reach.explore(source, entries, list(used))
        return reach

    def _run(self, source: int, exploration: graph.Exploration) -> None:
        """Run the graph of a source that shares no node with others."""
        try:
            entries, sinks = exploration.entries[source], exploration.sinks[source]
            found = graph.run(entries, self._gradients.pop(source), sinks, **self._flags)
            gradients = dict(zip(sinks, found, strict=True))
            self._accumulate(gradients)
            receives = {self._context.receives.get(node): None for node in sinks}
            for receive in receives:
                if receive is not None:
                    self.send(source, receive, gradients)
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        else:
            self.ran(source)

    def _run_shared(self, exploration: graph.Exploration) -> None:
        """Run the graph of all sources, as their gradients come."""
        run = SharedRun(self)
        token = current.set(CallContext(self._agent))
        try:
            found = graph.run_shared(exploration, run, **self._flags)
            self._accumulate(found)
            run.finish()
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        finally:
            current.reset(token)

    def wait_for(self, source: int) -> dict[int, Tensor | None]:
        """The gradients of the live tensors of a source, by index, when they are there."""
        limit = FAST_PATIENCE * self._agent.rpc_timeout if self.options.fast else 0
        with self._agent.waiting(), self._lock:
            is_there = self._arrival.wait_for(
                lambda: source in self._gradients or self.error is not None, limit or None
            )
            self._check()
            if not is_there:
                raise _unused({self._agent.me.name: self._machine.missing})
            return self._gradients[source]

    def message_of(self, node: Node) -> tuple[Receive, Collection[Node]] | None:
        """What an exit belongs to, and which exits of that are used. None: to none of this."""
        receive = self._context.receives.get(node)
        return None if receive is None else (receive, self._live.reached[receive])

    @property
    def _flags(self) -> dict[str, bool]:
        options = self.options
        return {"retain_graph": options.retain_graph, "create_graph": options.create_graph}

    def _accumulate(self, found: Mapping[Node, Tensor | None]) -> None:
        """Keep the gradients of those nodes that are leaves."""
        gradients: dict[Tensor, Tensor] = {}
        for node, gradient in found.items():
            if gradient is None or not graph.is_leaf(node):
                continue
            leaf = node.variable  # type: ignore[attr-defined]
            # What has a graph of its own is not changed in place anyway.
            has_graph = self.options.create_graph
            own = gradient if has_graph else graph.owned(leaf, gradient, self._taken)
            gradients[leaf] = own
        if self._held is None:
            self._context.accumulate(gradients)
        else:
            with self._lock:
                accumulate(self._held, gradients)

    def send(self, source: int, receive: Receive, found: dict[Node, Tensor | None]) -> None:
        """The gradients of a receive are complete: send them to where it came from."""
        with self._lock:
            self._check()
            self._machine.send(source, receive)
        used = ((index, node) for index, node in enumerate(receive.nodes) if node in found)
        gradients = {index: found[node] for index, node in used}
        self._call(receive, deliver, gradients, self._machine.answered, receive)

    def ran(self, source: int) -> None:
        """The run of a source is over."""
        with self._lock:
            if self.error is not None:
                return
            averages = self._held is not None and self._machine.runs_last
            if averages:
                self._machine.send(source, REPLICAS)
            is_answered = self._machine.ran(source)
        if averages:
            self._average()
        elif is_answered:
            self._settle(source)

    def _average(self) -> None:
        """All of this worker's gradients are there: average those of replicated leaves."""
        try:
            self._autograd.replicas.accumulate(self._context, self._held or {})
        except BaseException as error:
            self.fail(error)
        else:
            with self._lock:
                came = self._machine.answered(REPLICAS)
            self._settle(came)

    # Messages and answers.

    def _answer_later(self, came: Hashable) -> Future[Waiting]:
        answer = self._answers[came] = Future()
        return answer

    def _call(
        self,
        receive: Receive,
        handler: Callable[..., Any],
        content: Any,
        settle: Callable[[Hashable], Hashable | None],
        sent: Hashable,
    ) -> None:
        """Call a handler of the worker where a receive came from; it settles what was sent."""

        def on_answer(future: torch.futures.Future[Waiting]) -> None:
            try:
                waiting = future.value()
            except BaseException as error:
                self.fail(error)
                return
            with self._lock:
                if self.error is not None:
                    return
                self._note(waiting)
                came = settle(sent)
            self._settle(came)

        peer = receive.peer
        # The gradients belong to the context's graph only if they have one themselves.
        context = current.get() or CallContext(self._agent)
        active = self._context.id if self.options.create_graph else 0
        token = current.set(context._replace(gradients=active))
        try:
            if peer.lost is not None:
                raise peer.loss()
            call = (self._context.id, tuple(self.options), receive.number, content)
            future = self._agent.call_async(peer.name, handler, call)
        except BaseException as error:
            self.fail(error)
            return
        finally:
            current.reset(token)
        future.add_done_callback(on_answer)

    def _settle(self, came: Hashable | None) -> None:
        """Answer what came from a worker, if there is something to answer."""
        if came is None:
            return
        with self._lock:
            answer = self._answers.pop(came, None)
            is_over = self._machine.is_over
        if is_over:
            self._context.passes.pop(self.options.id, None)
        if answer is not None:
            answer.set_result(self.waiting)

    @property
    def waiting(self) -> Waiting:
        """What is known of sources that wait for a gradient; of interest in fast mode only.

        The number at a worker only falls, and the answer to the last gradient it gets says the
        final one.
        """
        if self.options.fast:
            with self._lock:
                self._note({self._agent.me.name: self._machine.missing})
        return self._waiting

    def _note(self, waiting: Waiting) -> None:
        for worker, count in waiting.items():
            self._waiting[worker] = min(count, self._waiting.get(worker, count))

    # The end.

    def check_complete(self) -> None:
        """At the root, after the pass.

        Raises:
            RuntimeError: in fast mode, tensors were sent that the roots do not depend on.
        """
        idle = {worker: count for worker, count in self.waiting.items() if count}
        if idle:
            raise _unused(idle)

    def fail(self, error: BaseException) -> None:
        """Something went wrong, here or elsewhere: nothing more is done, and who waits is told."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            answers, self._answers = self._answers, {}
            kept = (self._all, self._live, self._gradients, self._held, self._roots)
            self._all, self._live, self._gradients = (
                Reach(self._context),
                Reach(self._context),
                {},
            )
            self._held, self._roots = None, ()
            self._arrival.notify_all()
        del kept
        for answer in answers.values():
            answer.set_exception(error)

    def announce(self) -> bool:
        """Whether the failure is still to be told to other workers; from now on it is not."""
        with self._lock:
            is_new, self._is_announced = not self._is_announced, True
        return is_new

    def _check(self) -> None:
        if self.error is not None:
            raise self.error  # who hears of it may be the first to tell the root


def _pass_on(done: torch.futures.Future[Waiting], to: Future[Waiting]) -> None:
    try:
        to.set_result(done.value())
    except BaseException as error:
        to.set_exception(error)


def _unused(idle: Waiting) -> RuntimeError:
    where = ", ".join(f"{count} by worker {name!r}" for name, count in idle.items())
    return RuntimeError(
        'mode="fast" is for roots that depend on all tensors requiring grad that were sent in the '
        f"context; of these messages nothing is used: {where}. The gradients are incomplete; use "
        'mode="smart"'
    )


# Handlers. They answer with `Pass.waiting`.


def prepare(context: int, options: tuple[Any, ...], number: int, live: list[int]) -> Any:
    """Of the tensors that were sent with this number, those with these indices are used."""
    autograd = current_agent().gradients
    return autograd.on_prepare(context, Options(*options), number, live)  # type: ignore[attr-defined]


def survey(context: int, options: tuple[Any, ...]) -> Any:
    """To the root: which sources are live must be known."""
    return current_agent().gradients.on_survey(context, Options(*options))  # type: ignore[attr-defined]


def deliver(context: int, options: tuple[Any, ...], number: int, gradients: dict[int, Any]) -> Any:
    """The gradients of those tensors that were sent with this number and are used, by index."""
    autograd = current_agent().gradients
    return autograd.on_deliver(context, Options(*options), number, gradients)  # type: ignore[attr-defined]


def abort(context: int, options: tuple[Any, ...], reason: str) -> None:
    """The pass has failed elsewhere."""
    current_agent().gradients.on_abort(context, Options(*options), reason)  # type: ignore[attr-defined]
