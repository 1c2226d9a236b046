"""The program of a simulated worker: start, call, hold references, let go, shut down."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, ClassVar

import torch

from farcall import autograd, rpc
from farcall.autograd.autograd import Autograd
from farcall.errors import FarcallError
from farcall.runtime.agent import Agent
from farcall.runtime.context import CallContext, set_context
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.quirks import Quirks
from farcall.runtime.start import start_agent
from simulator.agents import functions
from simulator.agents.oracle import AgentOracle, Call
from simulator.system.installing import System
from simulator.system.scheduler import Process
from simulator.system.store import StoreClient

START_SECONDS = 30.0
PASS_SECONDS = 4 * START_SECONDS  # of each message, one after the other
REACH_SECONDS = 10.0
REACH_TRIES = 2  # the first may find that the one who had the name is dead
SHUTDOWN_SECONDS = 45.0

_SECRET = "ee89d25b89c546471e193d19d3be7f98"


class Plan:
    """The plan of all workers of a schedule.

    Attributes:
        names: of the workers.
        is_fixed: the group has a fixed size.
        quiet_at: when faults and work end, in virtual seconds.
        reach_at: when each worker has to reach each other.
        drop_at: when all let go of what they hold.
        end_at: when all shut down.
    """

    def __init__(self, random: Random) -> None:
        self.names = [f"w{n}" for n in range(random.choice((2, 2, 3, 4)))]
        self.is_fixed = random.random() < 0.3
        self.quiet_at = random.choice((5.0, 40.0, 150.0))
        self.pause = 2 * self.quiet_at / random.choice((10, 40, 100))
        self.reach_at = self.quiet_at + 200.0
        self.drop_at = self.reach_at + 60.0
        self.end_at = self.drop_at + 60.0


class _Options(RpcBackendOptions):
    """With a simulated store."""

    _checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        **RpcBackendOptions._checks,
        "store": lambda store: store,
    }


class Program:
    """The main thread's program of one process."""

    def __init__(
        self,
        system: System,
        plan: Plan,
        oracle: AgentOracle,
        name: str,
        note: Callable[..., None],
        happens: Callable[[], bool],
    ) -> None:
        self._system = system
        self._scheduler = system.scheduler
        self._random = Random(system.random.getrandbits(64))
        self._plan = plan
        self._oracle = oracle
        self.name = name
        self._note = note
        self._happens = happens
        self.agent: Agent | None = None
        self._pending: list[tuple[Call, Any]] = []
        self._references: list[tuple[Call, Any]] = []
        self._current: Call | None = None
        self.has_ended = False

    @property
    def _me(self) -> Process:
        me = self._scheduler.current()
        assert me is not None
        return me.process

    def run(self) -> None:
        """Do all of it."""
        while self.agent is None:
            self._start()
        while self._scheduler.now < self._plan.quiet_at:
            self._act()
            self._sleep(self._random.random() * self._plan.pause)
        for call, future in self._pending:
            self._collect(call, future)
        self._pending.clear()
        self._sleep_until(self._plan.reach_at)
        for other in self._plan.names:
            self._reach(other)
        self._sleep_until(self._plan.drop_at)
        self._references.clear()
        gc.collect()
        self._sleep_until(self._plan.end_at)
        self._oracle.check_left(self._me, self._held())
        self._shut_down()

    def _sleep(self, seconds: float) -> None:
        self._sleep_until(self._scheduler.now + seconds)

    def _sleep_until(self, moment: float) -> None:
        while self._scheduler.now < moment:
            self._scheduler.sleep(moment)

    def _start(self) -> None:
        plan, me = self._plan, self._me
        options = _Options(
            secret=_SECRET,
            listen=me.host.address,
            transports=("socket",),
            paths=("tcp",),
            tcp_streams=1,
            rpc_timeout=START_SECONDS,
            limit_openmp_spin=False,
        )
        begun = self._scheduler.now
        try:
            options.store = StoreClient(self._system.store)  # type: ignore[assignment]
            size = len(plan.names) if plan.is_fixed else None
            rank = plan.names.index(self.name) if plan.is_fixed else -1
            self.agent = start_agent(
                self.name, rank, size, options, Credentials(), 0, Quirks(), Autograd
            )
        except (FarcallError, RuntimeError) as error:
            took = self._scheduler.now - begun - me.stood_between(begun, self._scheduler.now)
            self._note(me, "could not start:", error)
            if took > 2 * START_SECONDS + 5.0:
                self._oracle.violate("AGT-1", f"{me!r} failed to start after {took:.1f} s: {error}")
            self._sleep(1.0)
            return
        set_context(CallContext(self.agent))
        self._note(me, "has joined", self.agent.me.id)
        self._oracle.joined.add(self.name)

    # Calls.

    def _act(self) -> None:
        act = self._random.choice(
            (
                self._sync,
                self._sync,
                self._async,
                self._remote,
                self._fetch,
                self._give,
                self._relay,
                self._let_go,
                self._differentiate,
            )
        )
        me = self._me
        self._current = None
        if not self._happens():
            return
        me.takes_interrupts = True
        try:
            act()
        except KeyboardInterrupt:
            self._note(me, "was interrupted in", self._current)
            if self._current is not None:
                self._current.is_given_up = True
        finally:
            me.takes_interrupts = False

    def _begin(self, kind: str, to: str, timeout: float = 0.0) -> Call:
        if not timeout:
            longest = self._random.choice((1.0, 4.0, 15.0, 45.0, 150.0))
            timeout = longest * (0.3 + 0.7 * self._random.random())
        self._current = call = self._oracle.begin(kind, self._me, to, timeout)
        self._note(self._me, "begins", call, f"of {timeout:.2f} s")
        return call

    def _end(self, call: Call, outcome: Any) -> None:
        self._note(self._me, "ends", call, repr(outcome)[:200])
        self._oracle.end(call, outcome)

    def _somebody(self) -> str:
        return self._random.choice(self._plan.names)

    def _arguments(self, call: Call) -> tuple[Any, ...]:
        seconds = self._random.choice((0.0, 0.0, 0.0, 0.1, 3.0))
        size = self._random.choice((0, 0, 0, 1000, 300_000))
        return call.number, seconds, size, call.kind == "fails"

    def _finish(self, call: Call, act: Callable[[], Any]) -> None:
        """Let a call end with what this gives or raises; as it should, with its number."""
        try:
            outcome = act()
        except Exception as error:
            outcome = error.with_traceback(None)
        self._end(call, outcome)

    def _sync(self) -> None:
        call = self._begin(self._random.choice(("sync", "sync", "fails")), self._somebody())
        arguments, timeout = self._arguments(call), call.timeout
        self._finish(
            call, lambda: rpc.rpc_sync(call.to, functions.work, arguments, timeout=timeout)[0]
        )

    def _relay(self) -> None:
        call = self._begin("relay", self._somebody())
        arguments, timeout = (call.number, self._somebody(), call.timeout), call.timeout
        self._finish(
            call, lambda: rpc.rpc_sync(call.to, functions.relay, arguments, timeout=timeout)
        )

    def _leave(self, kind: str, ask: Callable[..., Any]) -> tuple[Call, Any] | None:
        """Make a call that must return at once; None if that raises, which ends the call."""
        call = self._begin(kind, self._somebody())
        try:
            made = ask(call.to, functions.work, self._arguments(call), timeout=call.timeout)
        except Exception as error:
            self._oracle.returned(call)
            self._end(call, error.with_traceback(None))
            return None
        self._oracle.returned(call)
        return call, made

    def _async(self) -> None:
        left = self._leave("async", rpc.rpc_async)
        if left is None:
            return
        call, future = left
        future.add_done_callback(lambda done: self._finish(call, lambda: done.value()[0]))
        self._pending.append(left)
        if self._random.random() < 0.3:
            self._collect(*self._pending.pop())

    def _collect(self, call: Call, future: Any) -> None:
        with contextlib.suppress(Exception):
            future.wait()
        self._note(self._me, "has waited for", call)

    def _remote(self) -> None:
        left = self._leave("remote", rpc.remote)
        if left is not None:
            left[0].has_ended = True  # what becomes of it is seen when it is used
            self._references.append(left)

    def _fetch(self) -> None:
        if not self._references:
            return
        made, reference = self._random.choice(self._references)
        call = self._begin("fetch", made.to)

        def fetch() -> Any:
            found = reference.to_here(timeout=call.timeout)[0]
            if found != made.number:
                return found
            self._oracle.fetched(call)
            return call.number

        self._finish(call, fetch)

    def _give(self) -> None:
        if not self._references:
            return
        made, reference = self._random.choice(self._references)
        call = self._begin("use", self._somebody())

        def give() -> Any:
            arguments = (call.number, reference, call.timeout)
            number, found = rpc.rpc_sync(call.to, functions.use, arguments, timeout=call.timeout)
            return number if found == made.number else found

        self._finish(call, give)

    def _differentiate(self) -> None:
        call = self._begin("pass", self._somebody(), PASS_SECONDS)
        leaf = torch.ones(2, requires_grad=True)

        def differentiate() -> Any:
            with autograd.context() as context:
                scaled = rpc.rpc_sync(call.to, functions.scale, (call.number, leaf), timeout=30.0)
                autograd.backward(context, [scaled.sum()])
                found = autograd.get_gradients(context)[leaf].tolist()
            return call.number if found == [3.0, 3.0] else found

        self._finish(call, differentiate)

    def _let_go(self) -> None:
        if self._references:
            self._references.pop(self._random.randrange(len(self._references)))

    # The end.

    def _reach(self, other: str) -> None:
        if not self._oracle.is_there(other):
            return
        failures = []
        for _ in range(REACH_TRIES):
            call = self._oracle.begin("reach", self._me, other, REACH_SECONDS)
            call.has_ended = True
            try:
                rpc.rpc_sync(other, functions.work, (call.number,), timeout=REACH_SECONDS)
            except Exception as error:
                failures.append(repr(error))
            else:
                return
            self._sleep(1.0)
        self._oracle.violate("AGT-5", f"{self._me!r} does not reach {other}: {failures}")

    def _held(self) -> dict[str, int]:
        assert self.agent is not None
        found = {k: n for k, n in self.agent.references.statistics().items() if n}
        if self.agent.references._values:
            found["values"] = len(self.agent.references._values)
        assert isinstance(self.agent.gradients, Autograd)
        if len(self.agent.gradients):
            found["contexts"] = len(self.agent.gradients)
        if self.agent.coordinator.active:
            found["running calls"] = self.agent.coordinator.active
        return found

    def _shut_down(self) -> None:
        assert self.agent is not None
        begun = self._scheduler.now
        self._note(self._me, "shuts down")
        self.agent.shutdown()
        took = self._scheduler.now - begun - self._me.stood_between(begun, self._scheduler.now)
        self._note(self._me, f"has shut down in {took:.3f} s")
        if took > SHUTDOWN_SECONDS:
            self._oracle.violate("AGT-7", f"{self._me!r} needed {took:.1f} s to shut down")
        self._sleep(20.0)
        self.has_ended = True
        self._oracle.check_gone(self._me, self._system.kernel.open_files(self._me))
