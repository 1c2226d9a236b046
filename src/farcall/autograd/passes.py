"""One backward pass at one worker, in a running agent: graph, messages and answers together.

`protocol.backward` says what follows from what; here it is done. PREPARE and GRAD are calls of the
handlers at the end of this module; their answers are futures, so no thread waits for one but the
one that began the pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from farcall.autograd import graph
from farcall.autograd.records import Context, Receive
from farcall.errors import Cancelled
from farcall.protocol.backward import ROOT, Backward
from farcall.runtime.context import CallContext, current, current_agent
from farcall.runtime.future import Future

if TYPE_CHECKING:
    from farcall.autograd.recorder import Autograd

Tensor = torch.Tensor
Sink = Receive | Node  # a receive, or the node of a leaf
Waiting = dict[str, int]  # worker -> how many of its sources wait for their gradient
REPLICAS = object()  # stands for the gradients of replicated leaves, which other processes average


class Options(NamedTuple):
    """What was asked for at the root; the same at all workers of a pass."""

    id: int
    retain_graph: bool
    create_graph: bool
    fast: bool


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
        self._autograd = autograd
        self._agent = autograd.agent
        self._context = context
        self._lock = threading.Lock()
        self._machine: Backward[Sink | object] = Backward()
        self._edges: dict[int, Sequence[GradientEdge]] = {}
        self._exploration = graph.Exploration(context.receives)
        self._nodes: dict[Receive, list[Node]] = {}  # those of a receive that are reached
        self._shared: graph.SharedGraph | None = None
        self._queue: deque[tuple[int, dict[Sink, list[Node]]]] = deque()
        self._draining = False
        self._answers: dict[int, Future[Waiting]] = {}
        self._waiting: Waiting = {}
        self._taken: set[int] = set()

    # Wave one.

    def prepare(self, source: int, edges: Sequence[GradientEdge]) -> Future[Waiting] | None:
        """A source is live. A future of when everything that follows is prepared; None: it is."""
        with self._lock:
            self._check()
            receives = self._reach(source, edges)
            answer = self._answer_later(source, receives)
        for receive in receives:
            self._call(receive, prepare, (), self._machine.prepared)
        return answer

    def add_root(self, edges: Sequence[GradientEdge]) -> None:
        """Fast mode: the roots, at the worker that begins the pass."""
        with self._lock:
            self._reach(ROOT, edges)

    def _reach(self, source: int, edges: Sequence[GradientEdge]) -> list[Receive]:
        self._edges[source] = edges
        found: dict[Receive, None] = {}
        for node in self._exploration.explore(source, edges):
            receive = self._context.receives.get(node)
            if receive is not None:
                self._nodes.setdefault(receive, []).append(node)
                found[receive] = None
        return self._machine.reach(source, found)  # type: ignore[return-value]

    # Wave two.

    def deliver(self, source: int, gradients: Sequence[Tensor | None]) -> Future[Waiting] | None:
        """The gradient of a source. A future of when all that follows is done; None: it is."""
        with self._lock:
            self._check()
            if not self._machine.is_labelled:
                self._label()
            ready: list[Sink] = self._machine.arrive(source)  # type: ignore[assignment]
            edges = self._edges[source]
            if self._shared is not None:
                self._shared.keep(edges, gradients)
            answer = self._answer_later(source, ready)
            work = {sink: self._nodes_of(sink) for sink in ready}
            if ready and self._shared is not None:
                self._queue.append((source, work))
                if self._draining:
                    return answer
                self._draining = True
        if not ready:
            self._finish_if_over()
        elif self._shared is None:
            self._run(source, work, lambda nodes: self._run_alone(edges, gradients, nodes))
        else:
            self._drain(self._shared)
        return answer

    def _label(self) -> None:
        """All sources are known: which of them reach which sink?"""
        if self.options.fast:
            self._machine.take_all(self._context.sends)
            for number, send in list(self._context.sends.items()):
                if number not in self._edges:
                    self._reach(number, send.edges)
        sinks: dict[Sink | object, set[int]] = {}
        if self._exploration.is_shared:
            self._shared = graph.SharedGraph(self._edges, self._context.receives)
            labels: Iterable[tuple[Node, Sequence[int]]] = self._shared.labels.items()
        else:
            labels = ((n, (s,)) for s, nodes in self._exploration.sinks.items() for n in nodes)
        for node, sources in labels:
            sinks.setdefault(self._context.receives.get(node, node), set()).update(sources)
        self._machine.label(sinks)

    def _drain(self, shared: graph.SharedGraph) -> None:
        """Compute what is queued, one after the other: a later part may need a former one."""
        while True:
            with self._lock:
                if not self._queue or self.error is not None:
                    self._draining = False
                    return
                source, work = self._queue.popleft()
            self._run(source, work, lambda nodes: shared.run(nodes, **self._flags))

    @property
    def _flags(self) -> dict[str, bool]:
        options = self.options
        return {"retain_graph": options.retain_graph, "create_graph": options.create_graph}

    def _run_alone(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        nodes: Sequence[Node],
    ) -> list[Tensor | None]:
        return graph.run(edges, gradients, nodes, **self._flags)

    def _run(
        self,
        source: int,
        work: dict[Sink, list[Node]],
        compute: Callable[[Sequence[Node]], list[Tensor | None]],
    ) -> None:
        """Compute the gradients of these sinks, by their nodes, and send on those of receives."""
        nodes = [node for sink in work.values() for node in sink]
        try:
            found = dict(zip(nodes, compute(nodes), strict=True))
            self._accumulate(found)
        except BaseException as error:  # whatever the user's backward functions raise
            self.fail(error)
            return
        receives = [sink for sink in work if isinstance(sink, Receive)]
        with self._lock:
            if self.error is not None:
                return
            causes: list[object] = [*receives]
            if self._machine.runs_last and self._autograd.replicas.involved(self._context):
                causes.append(REPLICAS)
            caused = self._machine.ran(source, causes)
        for receive in receives:
            gradients = [found.get(node) for node in receive.nodes]
            self._call(receive, deliver, (gradients,), self._machine.answered)
        if REPLICAS in caused:
            self._average()
        if not caused:
            self._settle(source)

    def _nodes_of(self, sink: Sink) -> list[Node]:
        return self._nodes[sink] if isinstance(sink, Receive) else [sink]

    def _accumulate(self, found: dict[Node, Tensor | None]) -> None:
        for node, gradient in found.items():
            if gradient is None or not graph.is_leaf(node):
                continue
            leaf = node.variable  # type: ignore[attr-defined]
            # What has a graph of its own is not changed in place anyway.
            alone = self.options.create_graph
            own = gradient if alone else graph.owned(leaf, gradient, self._taken)
            self._context.accumulate(leaf, own)

    def _average(self) -> None:
        """All of this worker's gradients are there: average those of replicated leaves."""
        try:
            self._autograd.replicas.average(self._context)
        except BaseException as error:
            self.fail(error)
        else:
            with self._lock:
                source = self._machine.answered(REPLICAS)
            self._settle(source)

    # Messages and answers.

    def _answer_later(self, source: int, causes: Sequence[object]) -> Future[Waiting] | None:
        if not causes:
            return None
        answer: Future[Waiting] = Future()
        self._answers[source] = answer
        return answer

    def _call(
        self,
        receive: Receive,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        settle: Callable[[Sink], int | None],
    ) -> None:
        """Call a handler for what a receive got, at its sender."""

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
                source = settle(receive)
            self._settle(source)

        peer = receive.peer
        # The gradients belong to the context's graph only if they have one themselves.
        context = current.get() or CallContext(self._agent)
        active = self._context.id if self.options.create_graph else 0
        token = current.set(context._replace(gradients=active))
        try:
            if peer.lost is not None:
                raise peer.loss()
            call = (self._context.id, tuple(self.options), receive.number, *args)
            future = self._agent.call_async(peer.name, handler, call)
        except BaseException as error:
            self.fail(error)
            return
        finally:
            current.reset(token)
        future.add_done_callback(on_answer)

    def _settle(self, source: int | None) -> None:
        """Answer a source, if there is one to answer."""
        self._finish_if_over()
        with self._lock:
            answer = None if source is None else self._answers.pop(source, None)
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

    def _finish_if_over(self) -> None:
        with self._lock:
            if not self._machine.is_over:
                return
        self._autograd.finished(self._context, self)

    def used(self) -> tuple[list[int], list[Receive]]:
        """The sends and receives that took part."""
        return [source for source in self._edges if source != ROOT], list(self._nodes)

    def check_complete(self) -> None:
        """At the root, after the pass.

        Raises:
            RuntimeError: in fast mode, tensors were sent that the roots do not depend on.
        """
        idle = {worker: count for worker, count in self.waiting.items() if count}
        if idle:
            where = ", ".join(f"{count} by worker {name!r}" for name, count in idle.items())
            raise RuntimeError(
                'mode="fast" is for roots that depend on all tensors requiring grad that were sent '
                f"in the context; of these messages nothing is used: {where}. The gradients are "
                'incomplete; use mode="smart"'
            )

    def fail(self, error: BaseException) -> bool:
        """Something went wrong, here or elsewhere: nothing more is done, and who waits is told.

        False if that was known already.
        """
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            answers, self._answers = self._answers, {}
            kept = (self._edges, self._exploration, self._nodes, self._shared, self._queue)
            self._edges, self._nodes, self._shared, self._queue = {}, {}, None, deque()
            self._exploration = graph.Exploration(())
        del kept
        for answer in answers.values():
            answer.set_exception(error)
        return True

    def _check(self) -> None:
        if self.error is not None:
            raise Cancelled(f"backward pass {self.options.id} has failed: {self.error}")


# Handlers. They answer with `Pass.waiting`.


def prepare(context: int, options: tuple[Any, ...], number: int) -> Any:
    """A receive is reached: so is what sent it."""
    autograd = current_agent().gradients
    return autograd.on_prepare(context, Options(*options), number)  # type: ignore[attr-defined]


def deliver(context: int, options: tuple[Any, ...], number: int, gradients: list[Any]) -> Any:
    """The gradients of the tensors that were sent with this number, in order."""
    autograd = current_agent().gradients
    return autograd.on_deliver(context, Options(*options), number, gradients)  # type: ignore[attr-defined]


def abort(context: int, options: tuple[Any, ...], reason: str) -> None:
    """The pass has failed elsewhere."""
    current_agent().gradients.on_abort(context, Options(*options), reason)  # type: ignore[attr-defined]
