"""One backward pass at one worker, in a running agent: graph and messages together.

`protocol.backward` says what follows from what; here it is done. Gradients travel in messages of
their own, each with a share of the pass. What has failed is told to the root, which tells all.

Sources that share no node are run each by the thread that brings its gradient. Otherwise one thread
of the executor runs the graph of all of them, and sleeps where it needs a gradient that is not here
yet (see `graph.run_shared`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, Node

from farcall.autograd import contents, graph, handlers
from farcall.autograd.contents import Context
from farcall.autograd.ending import Dropped, Ending, unused
from farcall.autograd.handlers import Options
from farcall.autograd.leaf_hooks import call_leaf_hooks
from farcall.autograd.reach import Reach
from farcall.autograd.records import Receive, Source, with_grad
from farcall.autograd.shared_run import SharedRun
from farcall.protocol.backward import Backward, UnexpectedGradient
from farcall.runtime.context import CallContext, reset_context, set_context
from farcall.runtime.function_queue import DEEPEST
from farcall.runtime.future import Future
from farcall.runtime.peers import Peer
from farcall.serde import StoredError
from farcall.transport.base import Link

if TYPE_CHECKING:
    from farcall.autograd.runner import Runner

Tensor = torch.Tensor
Gradients = Mapping[int, Tensor | None]  # of the tensors of a source, by their indices
FAST_PATIENCE = 0.8  # of the timeout: how long a run waits for a gradient that may never come


class Pass:
    """See the module's description. Thread-safe.

    Args:
        runner: of this worker.
        context: that the pass is part of.
        options: of the pass.
        roots: at the worker that begins the pass.
    """

    def __init__(
        self, runner: Runner, context: Context, options: Options, roots: Source | None = None
    ) -> None:
        self.options = options
        self.error: StoredError | Dropped | None = None
        self.ending = None if roots is None else Ending()
        self.live: list[Source] = []  # when known: the sources that are live, the latest first
        self._runner = runner
        self._agent = runner.agent
        self._context = context
        self._roots = roots
        self._lock = threading.Lock()
        self._arrival: threading.Condition | None = None  # when a run has to wait for gradients
        self._machine = Backward()
        self._sources: dict[int, Source] = {}  # by number: those that are live
        self._is_alone: bool | None = None  # whether sources can be run without knowing the others
        self._all: Reach | None = None  # what all that was sent leads to, whether or not it is used
        self._of_roots: Reach | None = None  # what the roots lead to
        self._survey: Future[None] | None = None
        self._early: list[tuple[Source, int]] = []  # came before the live ones are known
        self._gradients: dict[int, Gradients] = {}
        self._answers: dict[Hashable, Future[None]] = {}  # to PREPARE
        self._peers: set[int] = set()  # incarnations that gradients were sent to
        self.links: set[Link] = set()  # by which they went
        self._taken: set[int] = set()
        self.is_announced = False  # that it has failed was told to others
        # What is computed, if other processes have replicas of some leaves: until all of it is.
        self._held: contents.Gradients | None = None
        if runner.replicas.involved(context):
            self._held = {}

    @cached_property
    def _live(self) -> Reach:
        """What is used of what was sent, and leads where."""
        return Reach(self._context.receives)

    # Which sources are live.

    def start(self) -> None:
        """At the root: wait until gradients may come."""
        self._decide()
        if not (self._is_alone or self.options.fast):
            self.survey().wait()
            self._begin()

    def _decide(self) -> None:
        """Must the live sources be known before anything is run?"""
        if self._is_alone is not None:
            return
        if not self.options.fast:
            everything, of_roots, is_shared = self._context.reach(self._roots)
            roots = self._roots
            # A worker that averages must know its last source; the roots may be the only one.
            sent_nothing = not (self._held is None or self._context.sources())
            with self._lock:
                if self._is_alone is None:
                    self._all, self._of_roots = everything, of_roots
                    self._is_alone = not is_shared and (self._held is None or sent_nothing)
                    if self._is_alone and sent_nothing and roots is not None:
                        self._reach(roots, roots, ())
                        self._machine.begin()
            return
        sources = self._context.sources()
        with self._lock:
            if self._is_alone is None:
                for source in [*sources, *([self._roots] if self._roots else [])]:
                    self._live.explore(source, range(len(source.edges)))
                    self._reach(source, source, ())
                self._is_alone = False

    def _reach(self, source: Source, part: Hashable, parts: Sequence[Hashable]) -> None:
        self._sources[source.number] = source
        self._machine.reach(source.number, part, parts)

    def _begin(self) -> None:
        """The live sources are known: run what they share. Not with the lock held."""
        with self._lock:
            if self.error is not None or self._machine.has_begun:
                return
            self.live = [self._sources[number] for number in self._machine.begin()]
            live, early, self._early = self._live, self._early, []
            try:
                for source, share in early:
                    self._machine.arrive(source.number, share)
            except UnexpectedGradient as unexpected:
                error: Exception | None = unexpected
            else:
                error = None
        if error is not None:
            self.fail(error)
        elif live.is_shared:
            self._agent.executor.submit(lambda: self._run_shared(live.exploration))
        else:
            for source, _ in early:
                self._run(source, live.exploration)

    def survey(self) -> Future[None]:
        """At the root: find out everywhere which sources are live. A future of when it is done."""
        assert self._roots is not None
        with self._lock:
            self._check()
            if self._survey is not None:
                return self._survey
            survey = self._survey = Future()
        prepared = self.prepare(self._roots, range(len(self._roots.edges)))
        if prepared is None:
            survey.set_result(None)
        else:
            prepared.add_done_callback(lambda done: _pass_on(done, survey))
        return survey

    def prepare(self, source: Source, live: Sequence[int]) -> Future[None] | None:
        """A source is live. A future of when everything that follows is prepared; None: it is.

        Args:
            live: indices of its tensors that are used.
        """
        with self._lock:
            self._check()
            part = (source.number, *live)
            parts = self._live.explore(source, live)
            self._reach(source, part, parts)
            if not parts:
                return None
            answer = self._answers[part] = Future()
        for receive, *used in parts:
            self._prepare_elsewhere(receive, used)
        return answer

    def _prepare_elsewhere(self, receive: Receive, used: list[int]) -> None:
        def on_answer(future: torch.futures.Future[None]) -> None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
                return
            with self._lock:
                part = self._machine.prepared((receive, *used))
                answer = None if part is None else self._answers.pop(part, None)
            if answer is not None:
                answer.set_result(None)

        try:
            if receive.peer.lost is not None:
                raise receive.peer.loss()
            call = (self._context.id, tuple(self.options), receive.number, used)
            future = self._agent.call_async(receive.peer.name, handlers.prepare, call)
        except BaseException as error:
            self.fail(error)
        else:
            future.add_done_callback(on_answer)

    def _ask_root(self) -> None:
        """Have the root find out which sources are live."""

        def on_answer(future: torch.futures.Future[None]) -> None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
            else:
                self._begin()

        try:
            call = (self._context.id, tuple(self.options))
            future = self._agent.call_async(self.options.root, handlers.survey, call)
        except BaseException as error:
            self.fail(error)
        else:
            future.add_done_callback(on_answer)

    # Gradients.

    def deliver(self, source: Source, share: int, gradients: Gradients) -> None:
        """The gradients of those tensors of a source that are used, and a share of the pass."""
        if self.options.create_graph:  # then torch's engine does not care for the caller's no_grad
            with_grad(self._deliver, source, share, gradients)
        else:
            self._deliver(source, share, gradients)

    def _deliver(self, source: Source, share: int, gradients: Gradients) -> None:
        self._decide()
        with self._lock:
            self._check()
            self._gradients[source.number] = gradients
            reach = self._alone(source) if self._is_alone else self._live
            is_known = self._is_alone or self._machine.has_begun
            is_first = not (is_known or self._early)
            if is_known:
                self._machine.arrive(source.number, share)
                self._notify()
            else:
                self._early.append((source, share))
        if is_known and (self._is_alone or not reach.is_shared):
            self._run(source, reach.exploration)
        elif is_first and self.options.fast:
            self._begin()
        elif is_first:
            self._ask_root()

    def _alone(self, source: Source) -> Reach:
        """What the used tensors of a source lead to."""
        used = self._gradients[source.number]
        if len(used) == len(source.edges):
            known = self._of_roots if source is self._roots else self._all
            assert known is not None
            return known
        reach = Reach(self._context.receives)
        reach.explore(source, used)
        return reach

    def _run(self, source: Source, exploration: graph.Exploration) -> None:
        """Run the graph of a source that shares no node with others."""
        try:
            sinks = exploration.sinks[source]
            gradients = self._gradients.pop(source.number)
            found = graph.run(source, gradients, sinks, **self._flags)
            exits: dict[Receive, dict[Node, Tensor | None]] = {}
            for index, sink in enumerate(sinks):
                receive = self._context.receives.get(sink.node)
                if receive is not None:
                    exits.setdefault(receive, {})[sink.node] = found[index]
            # The root gives its share back to itself, so there it costs nothing to keep some of it
            # for what can be done while others work. Elsewhere all of it goes with the last one.
            if self.ending is None:
                self._accumulate(sinks, found)
            gives_all = self.ending is None and self._held is None and not self.options.fast
            for count, (receive, arrived) in enumerate(exits.items(), 1):
                self.send(source, receive, arrived, last=gives_all and count == len(exits))
            if self.ending is not None:
                self._accumulate(sinks, found)
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        else:
            self.ran(source)

    def _run_shared(self, exploration: graph.Exploration) -> None:
        """Run the graph of all sources, as their gradients come."""
        run = SharedRun(self)
        token = set_context(CallContext(self._agent, depth=DEEPEST))
        try:
            self._accumulate(*graph.run_shared(exploration, run, **self._flags))
            run.finish()
            self._gradients, self._live = {}, Reach({})
        except BaseException as error:  # whatever the user's backward functions and hooks raise
            self.fail(error)
        finally:
            reset_context(token)

    def wait_for(self, source: Source) -> Gradients:
        """The gradients of the live tensors of a source, when they are there."""
        limit = FAST_PATIENCE * self._agent.rpc_timeout if self.options.fast else 0
        number = source.number
        with self._agent.waiting(), self._lock:
            self._arrival = self._arrival or threading.Condition(self._lock)
            is_there = self._arrival.wait_for(
                lambda: number in self._gradients or self.error is not None, limit or None
            )
            self._check()
            if not is_there:
                raise unused({self._agent.me.name: self._machine.missing})
            return self._gradients[number]

    def _notify(self) -> None:
        if self._arrival is not None:
            self._arrival.notify_all()

    def message_of(self, node: Node) -> tuple[Receive, Collection[Node]] | None:
        """What an exit belongs to, and which exits of that are used. None: to none of this."""
        receive = self._context.receives.get(node)
        return None if receive is None else (receive, self._live.reached[receive])

    @property
    def _flags(self) -> dict[str, bool]:
        options = self.options
        return {"retain_graph": options.retain_graph, "create_graph": options.create_graph}

    def _accumulate(self, sinks: Sequence[GradientEdge], found: Sequence[Tensor | None]) -> None:
        """Keep the gradients that were found of those sinks that are leaves."""
        # What has a graph of its own is not changed in place anyway.
        taken = None if self.options.create_graph else self._taken
        gradients = graph.of_leaves(sinks, found, taken)
        if self._runner.looks_for_leaf_hooks:
            call_leaf_hooks(gradients)
        if self._held is None:
            self._context.accumulate(gradients)
        else:
            with self._lock:
                contents.accumulate(self._held, gradients)

    def send(
        self,
        source: Source,
        receive: Receive,
        found: Mapping[Node, Tensor | None],
        last: bool = False,
    ) -> None:
        """The gradients of a receive are complete: send them to where it came from.

        Args:
            source: whose run has found them.
            found: the gradients of exits.
            last: whether the run has nothing else to do.
        """
        peer = receive.peer
        with self._lock:
            self._check()
            share = self._machine.send(source.number, last)
            self._peers.add(peer.incarnation)  # before we look whether it is lost
        gradients = {
            index: found[node] for index, node in enumerate(receive.nodes) if node in found
        }
        link = self._runner.send_gradients(
            peer, self._context, self.options, receive.number, share, gradients
        )
        self.links.add(link)

    def ran(self, source: Source) -> None:
        """The run of a source is over."""
        with self._lock:
            if self.error is not None:
                return
            averages = self._held is not None and self._machine.runs_last
            share = None if averages else self._machine.ran(source.number)
            missing = self._machine.missing if self.options.fast else -1
        if averages:
            try:
                # All of this worker's gradients are there: average those of replicated leaves.
                fresh = dict((self._held or {}).values())
                self._runner.replicas.accumulate(self._context, fresh)
            except BaseException as error:
                self.fail(error)
                return
            with self._lock:
                self._held = {}
                share = self._machine.ran(source.number)
        if share is None:
            return
        if self.ending is None:
            self._runner.give_back(self._context, self.options, share, missing)
        else:
            self.ending.give_back(self._agent.me.name, share, missing)

    # The end.

    def lost(self, peer: Peer) -> None:
        """A worker is gone. If it is the root, or gradients were sent to it, the pass has failed.

        So every death of a worker that has a share is noticed: going from the root along those who
        sent the share, the first dead worker got it from a living one.
        """
        is_root = self.ending is None and peer.name == self.options.root
        if is_root or peer.incarnation in self._peers:
            self.fail(peer.loss())

    def fail(self, error: BaseException, tell: bool = True) -> None:
        """Something went wrong, here or elsewhere: nothing more is done, and the root is told.

        Args:
            tell: False if it is from the root that we know, or the root does not care any more.
        """
        if self.error is not None:
            return
        answers = self._stop(StoredError(error))
        if answers is None:
            return
        self._end_waits(answers, error)
        if tell and self.ending is None:
            self._runner.tell_root(self._context.id, self.options)

    def drop(self, why: str) -> None:
        """The context is gone: nothing more is done, and no other worker is told."""
        dropped = Dropped(why)
        answers = self._stop(dropped)
        if answers or (answers is not None and self.ending is not None):
            self._end_waits(answers, dropped.error())

    def _stop(self, error: StoredError | Dropped) -> list[Future[None]] | None:
        """Do nothing more. Returns the futures that wait; None if it was stopped before."""
        with self._lock:
            if self.error is not None:
                return None
            self.error = error
            answers, self._answers = self._answers, {}
            kept = (self._all, self._of_roots, self._live, self._gradients, self._held)
            more = (self._roots, self._sources, self.live)
            self._all, self._of_roots, self._live, self._gradients = None, None, Reach({}), {}
            self._held, self._roots, self._sources, self.live = None, None, {}, []
            self._notify()
        del kept, more  # not under the lock: destructors of what is in it may be the user's
        return list(answers.values())

    def _end_waits(self, answers: list[Future[None]], error: BaseException) -> None:
        for answer in answers:
            answer.set_exception(error)
        if self.ending is not None:
            self.ending.fail(error)

    def announce(self) -> bool:
        """Whether the failure is still to be told to other workers; from now on it is not."""
        with self._lock:
            is_new, self.is_announced = not self.is_announced, True
        return is_new

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.error()  # whoever gets it may be the first to tell the root


def _pass_on(done: torch.futures.Future[None], to: Future[None]) -> None:
    try:
        done.value()
    except BaseException as error:
        to.set_exception(error)
    else:
        to.set_result(None)
