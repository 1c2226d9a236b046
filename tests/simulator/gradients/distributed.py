"""The program run on workers, with farcall's calls and backward.

Each worker has a `Host`, which keeps what programs have there. A host calls others with the
references it was given, in all the ways that farcall has. Several programs may run at once.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from farcall import autograd, rpc
from farcall.runtime.agent import Agent
from farcall.runtime.context import waiting
from farcall.testing.cluster import acting_as
from simulator.gradients.execute import Frame, Main, grad_mode, penalty, unpack
from simulator.gradients.ops import Site, Tally, make_parameters
from simulator.gradients.outcome import Outcome, Report, report_of, warnings_off
from simulator.gradients.program import (
    ASYNC,
    METHOD_ASYNC,
    METHOD_REMOTE,
    METHOD_SYNC,
    REMOTE,
    SYNC,
    Await,
    Call,
    Leaf,
    Pass,
    Program,
)
from simulator.gradients.unshared import unshared

async_execution = rpc.functions.async_execution


class Host:
    """The state of programs on one worker. Thread-safe.

    Args:
        index: of the worker.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.hosts: Sequence[rpc.RRef[Host]] = ()
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._shared: tuple[tuple[Leaf, ...], dict[int, torch.Tensor], Tally] | None = None
        self._parameters: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def meet(self, hosts: Sequence[rpc.RRef[Host]]) -> None:
        """Take these as the hosts of all workers; none: forget them."""
        self.hosts = hosts

    def share(self, leaves: tuple[Leaf, ...]) -> None:
        """Programs with these leaves have them in common from now on."""
        tally = Tally()
        self._shared = (leaves, make_parameters(leaves, self.index, tally), tally)

    def unshare(self) -> Counter[str]:
        """Stop sharing; return how often the hooks of the common leaves were called."""
        assert self._shared is not None
        (_, _, tally), self._shared = self._shared, None
        return Counter(tally.hooks)

    def begin(self, number: int, program: Program) -> None:
        """Begin a run of a program."""
        if self._shared is not None and self._shared[0] == program.leaves:
            _, parameters, tally = self._shared
        else:
            tally = Tally()
            parameters = make_parameters(program.leaves, self.index, tally)
        run = Run(number, program, Site(self.index, parameters), tally, self.hosts)
        with self._lock:
            self._runs[number] = run
            for parameter in parameters.values():
                self._parameters.append((number, weakref.ref(parameter)))

    def run(self, number: int) -> Run:
        """Return the run of this number."""
        return self._runs[number]

    def report(self, number: int, context_id: int) -> Report:
        """Return the report of a run here."""
        run = self._runs[number]
        return report_of(run.site, run.gradients(context_id), run.tally)

    def end(self, number: int) -> None:
        """Forget a run."""
        with self._lock:
            self._runs.pop(number).site.clear()

    def kept(self) -> list[int]:
        """Numbers of runs that are over, but not forgotten: something keeps their graph."""
        with self._lock:
            self._parameters = [one for one in self._parameters if one[1]() is not None]
            return sorted({number for number, _ in self._parameters} - self._runs.keys())

    # The main block.

    def drive(self, number: int, program: Program, fast: Sequence[bool]) -> Outcome:
        """Run a program whose main block is on this worker."""
        hosts = self.hosts[: program.workers]
        wait_all([host.rpc_async().begin(number, program) for host in hosts])
        try:
            with autograd.context() as context_id:
                outcome = self._drive(self._runs[number], context_id, fast)
                reports = [host.rpc_async().report(number, context_id) for host in hosts]
                outcome.reports = [report.wait() for report in reports]
            return outcome
        finally:
            wait_all([host.rpc_async().end(number) for host in hosts])

    def _drive(self, run: Run, context_id: int, fast: Sequence[bool]) -> Outcome:
        outcome = Outcome()
        frame, _ = run.frame(0, ())
        main = Main(frame, run.program)
        passes = run.program.passes
        first = 0
        while first < len(passes) and not outcome.error:
            last = first + 1
            while last < len(passes) and passes[last].at_once:
                last += 1
            starts = []
            for index in range(first, last):
                roots = main.up_to(index)
                if passes[index].penalty:
                    roots.append(penalty(autograd.get_gradients(context_id).values()))
                outcome.roots += [root.item() for root in roots]
                is_fast = passes[index].fast and index < len(fast) and fast[index]
                starts.append(partial(run.backward, context_id, passes[index], roots, is_fast))
            for index, error in enumerate(at_once(starts), first):
                if error is not None and not outcome.error:
                    outcome.error = f"pass {index}: {type(error).__name__}"
                    outcome.traceback = "".join(traceback.format_exception(error))
            first = last
        main.finish()  # also after an error: calls may be under way
        return outcome

    # The functions that programs call, as methods and as functions.

    def serve(self, number: int, block: int, args: Any) -> Any:
        """Run a block."""
        frame, stop = self._runs[number].frame(block, args)
        frame.run(0, stop)
        return unshared(frame.results())

    @async_execution
    def serve_later(self, number: int, block: int, args: Any) -> torch.futures.Future[Any]:
        """Run a block that gives a future."""
        run = self._runs[number]
        frame, stop = run.frame(block, args)
        split = run.program.blocks[block].split
        if split < 0:
            frame.run(0, stop)
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(unshared(frame.results()))
            return future
        step = run.program.blocks[block].steps[split]
        assert isinstance(step, Await)
        frame.run(0, split)

        def finish(done: torch.futures.Future[Any]) -> Any:
            frame.arrived(step, done.value())
            frame.run(split + 1, stop)
            return unshared(frame.results())

        pending: torch.futures.Future[Any] = frame[step.pending]
        return pending.then(finish)


def serve(host: rpc.RRef[Host], number: int, block: int, args: Any) -> Any:
    """Run a block, as a function."""
    return host.local_value().serve(number, block, args)


@async_execution
def serve_later(
    host: rpc.RRef[Host], number: int, block: int, args: Any
) -> torch.futures.Future[Any]:
    """Run a block that gives a future, as a function."""
    return host.local_value().serve_later(number, block, args)


def settle(reference: rpc.RRef[Any]) -> None:
    """Wait on its owner for what a reference refers to."""
    reference.local_value()


def keep(value: Any) -> Any:
    """Have a value on another worker."""
    return value


def wait_all(futures: Sequence[rpc.Future[Any]]) -> None:
    """Wait for all of these."""
    for future in futures:
        future.wait()


def at_once(starts: Sequence[Callable[[], None]]) -> list[Exception | None]:
    """Call these, each in a thread if they are several, and return the error that each raised."""
    errors: list[Exception | None] = [None] * len(starts)

    def start(index: int) -> None:
        try:
            with warnings_off():
                starts[index]()
        except Exception as error:
            errors[index] = error

    contexts = [contextvars.copy_context() for _ in starts]
    threads = [
        threading.Thread(target=context.run, args=(start, index))
        for index, context in enumerate(contexts)
    ]
    for thread in threads[1:]:
        thread.start()
    start(0)
    with waiting():  # so that others may use this thread of the worker
        for thread in threads[1:]:
            thread.join()
    return errors


class Run:
    """One run of a program on one worker: the world of its blocks there.

    Args:
        number: of the run.
        program: that is run.
        site: what the program has here.
        tally: counts the calls of the parameters' hooks.
        hosts: of all workers.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        site: Site,
        tally: Tally,
        hosts: Sequence[rpc.RRef[Host]],
    ) -> None:
        self.number = number
        self.program = program
        self.site = site
        self.tally = tally
        self._hosts = hosts

    def frame(self, block: int, args: Any) -> tuple[Frame, int]:
        """Return a frame for a block, and the number of its steps."""
        code = self.program.blocks[block]
        return Frame(self, self.program, self.site, code, unpack(args)), len(code.steps)

    def gradients(self, context_id: int) -> dict[str, torch.Tensor]:
        """Return the gradients that a context has here, by the name of the leaf.

        Raises:
            RuntimeError: the context has a leaf that is none of the program's.
        """
        found = autograd.get_gradients(context_id)
        leaves = {leaf: name for name, leaf in self.site.leaves().items()}
        if not leaves.keys() >= found.keys():
            raise RuntimeError(
                f"w{self.site.index} has a gradient of a leaf that is none of the program's: "
                "something that requires grad arrived without a link to what it comes from"
            )
        return {leaves[leaf]: gradient for leaf, gradient in found.items()}

    def backward(
        self, context_id: int, one: Pass, roots: Sequence[torch.Tensor], fast: bool
    ) -> None:
        """Run one backward pass, as the program wants it."""
        with grad_mode(one.quietly):
            self._backward(context_id, one, roots, fast)

    def _backward(
        self, context_id: int, one: Pass, roots: Sequence[torch.Tensor], fast: bool
    ) -> None:
        if one.at < 0:
            mode = "fast" if fast else "smart"
            autograd.backward(
                context_id,
                roots,
                retain_graph=one.retain_graph,
                create_graph=one.create_graph,
                mode=mode,
            )
            return
        (root,) = roots
        if one.at == self.site.index:
            reference = rpc.RRef(root)
        else:
            reference = rpc.remote(self._hosts[one.at].owner(), keep, args=(root,))
        reference.backward(context_id, one.retain_graph)

    def call(self, site: Site, call: Call, args: Any) -> Any:
        """Have a block run on its worker."""
        block = self.program.blocks[call.block]
        host = self._hosts[block.worker]
        args = (self.number, call.block, unshared(args))
        later = block.split != -1
        if call.way in _FUNCTIONS:
            function = serve_later if later else serve
            return _FUNCTIONS[call.way](host.owner_name(), function, (host, *args))
        methods = _METHODS[call.way](host)
        return methods.serve_later(*args) if later else methods.serve(*args)

    def wait(self, site: Site, pending: Any) -> Any:
        """Return the results of a call."""
        return pending.wait() if isinstance(pending, torch.futures.Future) else pending

    def refer(self, site: Site, value: Any) -> Any:
        """Return a reference to a value of this worker."""
        return rpc.RRef(unshared(value))

    def fetch(self, site: Site, reference: rpc.RRef[Any]) -> Any:
        """Return the value, or a copy."""
        return reference.to_here()

    def settle(self, site: Site, reference: rpc.RRef[Any]) -> None:
        """Wait until the value is there."""
        rpc.rpc_sync(reference.owner(), settle, args=(reference,))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    SYNC: rpc.rpc_sync,
    ASYNC: rpc.rpc_async,
    REMOTE: rpc.remote,
}
_METHODS: dict[str, Callable[[rpc.RRef[Host]], Any]] = {
    METHOD_SYNC: rpc.RRef.rpc_sync,
    METHOD_ASYNC: rpc.RRef.rpc_async,
    METHOD_REMOTE: rpc.RRef.remote,
}


@contextmanager
def hosting(agents: Sequence[Agent]) -> Iterator[list[rpc.RRef[Host]]]:
    """References, as the first agent has them, to a host on each of these agents."""
    with acting_as(agents[0]):
        hosts: list[rpc.RRef[Host]] = [
            rpc.remote(agent.me.name, Host, args=(index,)) for index, agent in enumerate(agents)
        ]
        for host in hosts:
            host.rpc_sync().meet(hosts)
    try:
        yield hosts
    finally:
        with acting_as(agents[0]):
            for host in hosts:
                host.rpc_sync().meet(())


def run_distributed(
    hosts: Sequence[rpc.RRef[Host]], number: int, program: Program, fast: Sequence[bool]
) -> Outcome:
    """Run a program over workers; return its outcome. Acts as the worker of the first host.

    Args:
        hosts: as many as the program has workers, or more.
        number: of the run, unlike those of others at the same hosts.
        program: to run.
        fast: for each pass, whether the local run says that it may use `mode="fast"`.
    """
    root = hosts[program.root]
    if root.is_owner():
        return root.local_value().drive(number, program, fast)
    outcome: Outcome = root.rpc_sync().drive(number, program, fast)
    return outcome
