"""The supervisions that one worker knows of: their machines, names, and waiting users."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from farcall.errors import Cancelled, OwnerDied, RpcTimeout
from farcall.ids import RefId, original
from farcall.log import get_logger
from farcall.protocol.knowledge import Knowledge
from farcall.protocol.standing import Edition, Number, SupervisionAnswer, SupervisionState
from farcall.protocol.succession import Editions, KeptSnapshots
from farcall.protocol.supervision_instructions import (
    After,
    Ask,
    DropObjects,
    GivenUp,
    Instruction,
    LetGo,
    NoSnapshot,
    NotMade,
    Present,
    Started,
    TakesOver,
)
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.membership.roster import Listener
from farcall.supervision.asking import Asking
from farcall.supervision.plans import Remote, Spec, is_usable
from farcall.transport.brief_threads import BriefThreads

logger = get_logger("farcall")

T = TypeVar("T")

MOST_ENDED = 64  # supervisions that are over, whose objects still have names in errors


class AgentSurroundings:
    """See `Surroundings`: what an agent sees. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        me = agent.me
        self.me = Present(me.name, me.id, me.role, me.incarnation, me.incarnation)
        self._agent = agent

    def now(self) -> float:
        return time.monotonic()

    def others(self) -> list[Present]:
        live = [peer for peer in self._agent.directory.live() if peer.worker is not self._agent.me]
        return [
            Present(p.name, p.worker.id, p.worker.role, original(p.incarnation), p.incarnation)
            for p in live
        ]

    def is_usable(self, rref: Any) -> bool:
        return is_usable(rref)

    def may_come(self, name: str) -> bool:
        return self._agent.directory.can_ask(name)


class Supervisors:
    """The supervisions that one agent knows. Thread-safe.

    Each is a machine (`Knowledge`), which gets its events under a lock. Its instructions are
    carried out without the lock. Answers and timers are events of one thread without waiting.

    Args:
        remote: what runs on other workers.
    """

    def __init__(self, agent: Agent, remote: Remote) -> None:
        self._agent = agent
        self._around = AgentSurroundings(agent)
        self._asking = Asking(agent, remote)
        self._later = agent.group.later
        self._lock = threading.Lock()  # guards what follows
        self._known: dict[int, Knowledge] = {}
        self._names: dict[str, tuple[int, int]] = {}  # the key of the supervision, and which child
        self._awaited: list[tuple[str, Future[RRef[Any]]]] = []
        self._starting: dict[int, Future[None]] = {}  # the callers of `supervise` wait for these
        self._listener: Listener | None = None
        self._listening = BriefThreads(f"farcall-supervise-{agent.me.name}", 1)
        self.snapshots: KeptSnapshots[Any] = KeptSnapshots()
        agent.names.on_killed = self._on_killed

    # Events.

    def _tell(self, known: Knowledge, event: Callable[[], T]) -> T:
        """Tell a machine of an event, and do what it says."""
        with self._lock:
            result = event()
            to_do = known.take()
        while to_do:
            self._carry_out(known, to_do.pop(0))
        self._settle()
        return result

    def _tell_later(self, known: Knowledge, event: Callable[[], object], delay: float) -> None:
        def tell() -> None:
            if not (self._agent.status.is_leaving or self._agent.status.is_closed):
                self._tell(known, event)

        self._later.post(tell, delay)

    def _knowledge(self, state: SupervisionState) -> Knowledge:
        with self._lock:
            known = self._known.get(state.key)
            if known is None:
                known = Knowledge(state, self._around, self.snapshots, Editions())
                self._known[state.key] = known
                names = {name: (state.key, n) for n, name in enumerate(state.names)}
                # The news of an end may come after those of the supervision that has its names now.
                first, last = (names, self._names) if state.is_over else (self._names, names)
                self._names = {**first, **last}
                self._discard_oldest()
        if not state.is_over:
            self._listen()
        return known

    def _discard_oldest(self) -> None:
        over = [key for key, known in self._known.items() if known.state.is_over]
        for key in over[: max(0, len(over) - MOST_ENDED)]:
            del self._known[key]
            self._names = {name: at for name, at in self._names.items() if at[0] != key}

    def hear(self, state: SupervisionState, *, passes_on: bool = False) -> SupervisionAnswer:
        """Hear how a supervision is. See `Knowledge.hear`."""
        known = self._knowledge(state)
        return self._tell(known, partial(known.hear, state, passes_on=passes_on))

    def adopt(self, state: SupervisionState, spec: Spec) -> SupervisionAnswer:
        """Keep the plan of a supervision. See `Knowledge.adopt`."""
        known = self._knowledge(state)
        return self._tell(known, partial(known.adopt, state, spec.plan()))

    def make(self, state: SupervisionState, child: int, edition: Edition, ref: RefId) -> None:
        """Hear that a child is to be made here.

        Raises:
            OwnerDied: another one is to be made, or was.
        """
        known = self._knowledge(state)
        if not self._tell(known, partial(known.make, child, edition, ref, state)):
            raise OwnerDied(self._agent.me.name, "another object was made in place of this one")

    def keep(self, key: int, child: int, number: Number, snapshot: Any) -> None:
        """Keep a snapshot, unless there is one that counts more."""
        with self._lock:
            dropped = self.snapshots.put(key, child, number, snapshot)
        del dropped  # its destructor does not run under the lock

    def _on_killed(self, ref: RefId) -> None:
        """Hear that the user has killed an object, which may be a child."""
        for known in self._all():
            self._tell(known, partial(known.killed, ref))

    def killed(self, key: int, child: int, edition: Edition) -> None:
        """Hear that a child of another worker was killed on purpose."""
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            self._tell(known, partial(known.heard_killed, child, edition))

    def begin(self, spec: Spec, started: Future[None]) -> None:
        """Supervise from now on. The future completes when it has started, or could not."""
        names = tuple(child.name for child in spec.children)
        state = SupervisionState.first(spec.key, names, self._around.me.keeper, self._around.me.id)
        with self._lock:
            self._starting[spec.key] = started

        def lead() -> None:
            known = self._knowledge(state)
            self._tell(known, partial(known.begin, spec.plan()))

        self._later.post(lead)
        if self._agent.status.is_closed:  # perhaps before it could be posted
            self._note_start(spec.key, self._agent.status.closed_error())

    def fail_start(self, key: int, error: Exception) -> None:
        """Give up a supervision that has not started yet. Called later, in the thread for that."""
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            self._tell(known, partial(known.fail_start, error))

    def _all(self) -> list[Knowledge]:
        with self._lock:
            return list(self._known.values())

    # Instructions.

    def _carry_out(self, known: Knowledge, instruction: Instruction) -> None:
        match instruction:
            case Ask(to, question, done):
                then = None if done is None else partial(self._answered, known, done)
                self._asking.ask(known.state.key, to, question, then)
            case After(seconds, act):
                self._tell_later(known, act, seconds)
            case DropObjects(made):
                self._end(made)
            case Started(error):
                self._note_start(known.state.key, error)
            case LetGo():
                pass  # it goes with the instruction
            case _:
                self._log(instruction)

    def _answered(self, known: Knowledge, done: Callable[[Any], object], answer: Any) -> None:
        self._tell_later(known, partial(done, answer), 0.0)

    def _end(self, made: Sequence[RefId]) -> None:
        for ref in made:
            slot = self._agent.references.slot_of(ref)
            if slot is not None:
                why = "its supervisor has ended the object"
                slot.kill(OwnerDied(self._agent.me.name, why))

    def _note_start(self, key: int, error: Exception | None) -> None:
        with self._lock:
            started = self._starting.pop(key, None)
        if started is None:
            return
        if error is not None:
            complete_with(started, error)
        elif not started.done():
            started.set_result(None)

    def _log(self, instruction: Instruction) -> None:
        me = self._agent.me.name
        match instruction:
            case TakesOver(names, gone):
                listed = ", ".join(map(repr, names))
                logger.warning("%s: supervises %s from now on: %r is gone", me, listed, gone)
            case GivenUp(names, why):
                logger.error("%s: gives %s up: %s", me, ", ".join(map(repr, names)), why)
            case NotMade(why):
                logger.warning("%s: %s", me, why)
            case NoSnapshot(name, error):
                logger.warning("%s: no snapshot of %r: %s", me, name, error)

    # News of the group.

    def _listen(self) -> None:
        with self._lock:
            if self._listener is not None:
                return
            self._listener = Listener(self.look_soon, joins=True, leaves=True)
        self._listening.run(self._begin_to_listen)

    def _begin_to_listen(self) -> None:
        """Hear of all that come and go. Takes as long as the store, and silent workers."""
        assert self._listener is not None
        with contextlib.suppress(Cancelled):  # the agent is shut down
            self._agent.group.roster.listen(self._listener, present=False)
        self.look_soon()

    def look_soon(self, _: object = None) -> None:
        """Have all machines look who is there: a worker has come or gone."""
        for known in self._all():
            self._tell_later(known, known.look, 0.0)

    # References that follow.

    def state_of(self, name: str) -> SupervisionState | None:
        """Return the plan of the supervision of an object, as far as it is known."""
        with self._lock:
            at = self._names.get(name)
            return None if at is None else self._known[at[0]].state

    def find(self, name: str) -> RRef[Any] | None:
        """Return the present reference to an object; None while it is made again.

        Raises:
            OwnerDied: it was given up.
            Cancelled: it was killed.
        """
        with self._lock:
            key, number = self._names[name]
            state = self._known[key].state
        child = state.children[number]
        if state.given_up:
            error = OwnerDied(child.owner, f"{name!r} was given up: {state.given_up}")
            error.given_up = True
            raise error
        if child.has_ended:
            raise Cancelled(f"the object {name!r} was killed")
        is_there = child.is_running and child.has_usable(is_usable)
        return child.rref if is_there else None

    def when_there(self, name: str, seconds: float) -> Future[RRef[Any]]:
        """Return a future of the reference to an object, for when it is made again.

        Args:
            seconds: how long to wait; inf for no limit.
        """
        future: Future[RRef[Any]] = Future()
        with self._lock:
            self._awaited.append((name, future))
        self._settle()
        if not future.done() and seconds < threading.TIMEOUT_MAX:
            error = RpcTimeout(
                f"the supervised object {name!r} was not made again within {seconds:g} s"
            )
            self._later.post(partial(complete_with, future, error), seconds)
        return future

    def _settle(self) -> None:
        """Complete what waits for objects that are there, or never will be."""
        with self._lock:
            awaited, self._awaited = self._awaited, []
        left = []
        for name, future in awaited:
            if future.done():
                continue
            try:
                found = self.find(name)
            except Exception as error:
                complete_with(future, error)
                continue
            if found is None:
                left.append((name, future))
            else:
                future.set_result(found)
        with self._lock:
            self._awaited += left

    def close(self) -> None:
        """Hear that the agent has shut down."""
        with self._lock:
            awaited, self._awaited = self._awaited, []
            starting, self._starting = self._starting, {}
        self._listening.close(0)
        error = self._agent.status.closed_error()
        for _, future in awaited:
            complete_with(future, error)
        for started in starting.values():
            complete_with(started, error)
