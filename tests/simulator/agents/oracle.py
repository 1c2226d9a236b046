"""The oracle of whole workers: knows every fault, and judges every outcome.

AGT-1  A call ends once, by its deadline, not counting the time in which its caller stood still.
AGT-2  A call ends with what its function gave or raised; with RpcTimeout, at its deadline; with
       PeerLost, if the callee has ended or nothing got through between the two for long; with
       UnknownWorker, if the callee is not there or the store was not asked.
AGT-3  A function runs once at most, and has run if its call has its result.
AGT-4  `rpc_async` and `remote` return at once, whatever peer, network and store do.
AGT-5  After all faults, every worker reaches every other by its name.
AGT-6  When nothing is in use any more, no reference, value, or running call is left.
AGT-7  A graceful shutdown ends, and no thread and no descriptor is left after it.
AGT-8  A call to a worker of which nothing is heard for `dead_host_timeout` ends with PeerLost.
AGT-9  Nothing of farcall's own raises where no code handles it, and nothing waits forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from farcall.errors import Cancelled, PeerLost, RemoteError, RpcTimeout, UnknownWorker
from simulator.agents.functions import Refused
from simulator.schedule import Violation
from simulator.system.network import Network
from simulator.system.scheduler import Process, SimThread
from simulator.system.store import StoreServer

SLACK = 0.5  # seconds that threads, preempted at any point, may need
AT_ONCE = 0.1
_NESTED = ("relay", "use", "fetch", "pass")  # calls that make others
SILENCE = 36.0  # seconds after which a dark host is known to be one
LONG = 20.0  # seconds of an outage after which a peer may count as lost


class Call:
    """A call of a simulated worker."""

    def __init__(
        self, number: int, kind: str, caller: Process, to: str, begun: float, timeout: float
    ) -> None:
        self.number = number
        self.kind = kind
        self.caller = caller
        self.to = to
        self.begun = begun
        self.timeout = timeout
        self.has_ended = False
        self.is_given_up = False  # by Ctrl-C

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.caller!r} to {self.to}"


class AgentOracle:
    """Judges. `violations` has all that it found."""

    def __init__(self, network: Network, store: StoreServer) -> None:
        self._network = network
        self._scheduler = network.scheduler
        self._store = store
        self.violations: list[Violation] = []
        self.calls: list[Call] = []
        self._ran: Counter[int] = Counter()
        self.ended: dict[str, list[tuple[Process, float]]] = {}
        self.here: dict[str, Process] = {}
        self.joined: set[str] = set()

    def violate(self, invariant: str, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(invariant, f"at {self._scheduler.now:.3f} s: {text}"))

    def begin(self, kind: str, caller: Process, to: str, timeout: float) -> Call:
        """Note that a call begins."""
        call = Call(len(self.calls), kind, caller, to, self._scheduler.now, timeout)
        self.calls.append(call)
        return call

    def ran(self, call: int, at: SimThread) -> None:
        """Note that a function runs."""
        self._ran[call] += 1
        if self._ran[call] > 1:
            self.violate("AGT-3", f"{self.calls[call]} runs twice")

    def returned(self, call: Call) -> None:
        """`rpc_async` or `remote` has returned."""
        took = self._took(call)
        if took > AT_ONCE:
            self.violate("AGT-4", f"{call} returned after {took:.3f} s")

    def _took(self, call: Call) -> float:
        now = self._scheduler.now
        return now - call.begun - call.caller.stood_between(call.begun, now)

    def end(self, call: Call, outcome: Any) -> None:
        """Note that a call ends, with a value or an exception."""
        if call.has_ended:
            self.violate("AGT-1", f"{call} ends twice")
        call.has_ended = True
        took = self._took(call)
        if took > call.timeout + SLACK:
            self.violate("AGT-1", f"{call} took {took:.3f} s of {call.timeout:.3f}: {outcome!r}")
        if call.kind not in _NESTED and self._dark_for(call) > SILENCE:
            self.violate("AGT-8", f"{call} waited {took:.3f} s for a dark host: {outcome!r}")
        if not self._may_end(call, outcome):
            self.violate("AGT-2", f"{call}, {took:.3f} s of {call.timeout:.3f}: {outcome!r}")

    def _may_end(self, call: Call, outcome: Any) -> bool:
        if not isinstance(outcome, BaseException):
            if outcome != call.number:
                return False
            if not self._ran[call.number]:
                self.violate("AGT-3", f"{call} has a result and never ran")
            return True
        if isinstance(outcome, Refused):
            return call.kind == "fails"
        if isinstance(outcome, RpcTimeout):
            return call.kind in _NESTED or self._scheduler.now - call.begun >= call.timeout - 0.01
        if isinstance(outcome, PeerLost):
            return self._may_be_lost(call, call.kind in _NESTED)
        if isinstance(outcome, UnknownWorker):
            return call.kind in _NESTED or self.may_be_unknown(call.to)
        if isinstance(outcome, Cancelled):
            # A value that was never made, since its `remote` failed; or the end of a pass.
            is_of_fault = call.kind == "pass" and bool(self.ended or self._network.outages)
            return is_of_fault or call.kind in ("use", "fetch")
        return isinstance(outcome, RemoteError)

    def _dark_for(self, call: Call) -> float:
        """Return for how long nothing got through to the callee while the call went on."""
        callee = self.here.get(call.to)
        if callee is None or call.kind in ("remote", "reach"):
            return 0.0
        ends = frozenset((str(call.caller.host), str(callee.host)))
        now = self._scheduler.now
        times = [
            (max(begin, call.begun), min(end, now))
            for one, begin, end in self._network.outages
            if one == ends and max(begin, call.begun) < min(end, now)
        ]
        return max(
            (end - begin - call.caller.stood_between(begin, end) for begin, end in times),
            default=0.0,
        )

    def _may_be_lost(self, call: Call, third: bool) -> bool:
        now = self._scheduler.now
        if self.ended.get(call.to) or (third and self.ended):
            return True
        for ends, begin, end in self._network.outages:
            touches = str(call.caller.host) in ends or third
            if touches and begin < now and min(end, now) - begin >= LONG:
                return True
        return False

    def may_be_unknown(self, name: str) -> bool:
        """Return whether a worker need not be found by its name."""
        now = self._scheduler.now
        return (
            name not in self.joined
            or bool(self.ended.get(name))
            or any(begin <= now for begin, _ in self._store.outages)
            or any(self._store.host.name in ends for ends, _, _ in self._network.outages)
        )

    def fetched(self, call: Call) -> None:
        """Note that a call that runs no function has got its answer."""
        self._ran[call.number] += 1

    def is_there(self, name: str) -> bool:
        """Return whether a worker of this name lives."""
        return name in self.here

    # The end.

    def check_calls(self) -> None:
        """Judge whether all calls of living callers have ended."""
        for call in self.calls:
            if not (call.has_ended or call.is_given_up) and call.caller.is_alive:
                self.violate("AGT-1", f"{call} has no outcome")

    def check_left(self, process: Process, found: dict[str, int]) -> None:
        """Judge what a worker still holds."""
        if found:
            self.violate("AGT-6", f"{process!r} holds {found}")

    def check_gone(self, process: Process, files: Iterable[object]) -> None:
        """Judge the rest of a worker that has shut down."""
        threads = [one for one in process.threads if one is not process.main]
        if threads:
            self.violate("AGT-7", f"{process!r} still has {sorted(map(repr, threads))}")
        if files := list(files):
            self.violate("AGT-7", f"{process!r} still has {len(files)} descriptors: {files}")
