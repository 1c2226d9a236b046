"""The supervisions that one worker knows of. It supervises those that it is the first keeper of."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import Any

import torch

from farcall.errors import Cancelled, OwnerDied, RpcTimeout
from farcall.ids import RefId
from farcall.log import get_logger
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.membership.roster import Listener
from farcall.supervision.leader import Leader, Remote, Snapshots, is_alive
from farcall.supervision.plans import Spec, State, is_usable
from farcall.transport.brief_threads import BriefThreads

logger = get_logger("farcall")

MOST_ENDED = 64  # supervisions that are over, whose objects still have names in errors


class _Plan:
    """A supervision, as this worker knows it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.heard_at = time.monotonic()
        self.spec: Spec | None = None  # None if this worker can't take over
        self.leader: Leader | None = None  # if it supervises
        self.asked: dict[str, int] = {}  # child -> owner, asked for a usable reference


class Supervisors:
    """The supervisions that one agent knows. Thread-safe; all that leads to calls is done later.

    Args:
        remote: what runs on other workers.
    """

    def __init__(self, agent: Agent, remote: Remote) -> None:
        self._agent = agent
        self._remote = remote
        self._later = agent.group.later
        self._lock = threading.Lock()  # guards what follows
        self._plans: dict[int, _Plan] = {}
        self._names: dict[str, tuple[int, int]] = {}  # the key of the supervision, and which child
        self._awaited: list[tuple[str, Future[RRef[Any]]]] = []
        self._made: dict[tuple[int, int], tuple[int, RefId]] = {}  # children here: generation, ref
        self._listener: Listener | None = None
        self._listening = BriefThreads(f"farcall-supervise-{agent.me.name}", 1)
        self.snapshots = Snapshots()
        agent.names.on_killed = self._on_killed

    # What is known.

    def hear(self, state: State, spec: Spec | None = None) -> None:
        """Hear how a supervision is, and how it is to be. Only what is newer counts."""
        with self._lock:
            plan = self._plans.get(state.key)
            if plan is None:
                plan = self._plans[state.key] = _Plan(state)
                names = {name: (state.key, n) for n, name in enumerate(state.names)}
                # What is over may be heard of after what has its names now.
                first, last = (names, self._names) if state.is_over else (self._names, names)
                self._names = {**first, **last}
                self._discard_oldest()
            elif state.order > plan.state.order or (
                state.order == plan.state.order and state.reaches_more_than(plan.state)
            ):
                plan.state, plan.heard_at = state, time.monotonic()
            plan.spec = plan.spec or spec
            state = plan.state
            if state.is_over:
                plan.spec = None
        self._drop_outdated(state)
        if state.is_over:
            self.snapshots.discard(state.key)
        else:
            self._listen()
        self._settle()
        self.look_soon()

    def _discard_oldest(self) -> None:
        over = [key for key, plan in self._plans.items() if plan.state.is_over]
        for key in over[: max(0, len(over) - MOST_ENDED)]:
            del self._plans[key]
            self._names = {name: at for name, at in self._names.items() if at[0] != key}

    def state_of(self, name: str) -> State | None:
        """Return what is known of the supervision of an object."""
        with self._lock:
            at = self._names.get(name)
            return None if at is None else self._plans[at[0]].state

    # References that follow.

    def find(self, name: str) -> RRef[Any] | None:
        """Return the present reference to an object; None while it is made again.

        Raises:
            OwnerDied: it was given up.
            Cancelled: it was killed.
        """
        with self._lock:
            key, number = self._names[name]
            state = self._plans[key].state
        child = state.children[number]
        if state.given_up:
            raise OwnerDied(child.owner, f"{name!r} was given up: {state.given_up}")
        if child.has_ended:
            raise Cancelled(f"the object {name!r} was killed")
        usable = child.is_running and child.rref is not None and is_usable(child.rref)
        return child.rref if usable else None

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

    # Children that live here.

    def note_made(self, key: int, child: int, generation: int, ref: RefId) -> None:
        """A child is being made here."""
        self._drop(key, child, generation, None)
        with self._lock:
            self._made[key, child] = (generation, ref)

    def _drop_outdated(self, state: State) -> None:
        for number, child in enumerate(state.children):
            ref = None if child.rref is None else child.rref._handle.ref
            before = child.generation + 1 if state.is_over else child.generation
            self._drop(state.key, number, before, ref)

    def _drop(self, key: int, child: int, before: int, unlike: RefId | None) -> None:
        """Drop a child of an earlier generation, or one that another one was preferred to."""
        with self._lock:
            generation, ref = self._made.get((key, child), (before, None))
            is_outdated = generation < before or (
                generation == before and unlike not in (None, ref)
            )
            if ref is None or not is_outdated:
                return
            del self._made[key, child]
        place = self._agent.references.place_of(ref)
        if place is not None:
            place.kill(OwnerDied(self._agent.me.name, "its supervisor has ended the object"))

    def _on_killed(self, ref: RefId) -> None:
        """The user has killed an object: if it is a child, it is not made again."""
        with self._lock:
            found = [(at, made[0]) for at, made in self._made.items() if made[1] == ref]
            if not found:
                return
            (key, child), generation = found[0]
            del self._made[key, child]
            keepers = self._plans[key].state.keepers if key in self._plans else ()
        for name, _ in keepers:
            try:
                call = self._remote.killed, (key, child, generation)
                self._agent.call_async(name, *call).add_done_callback(lambda _: None)
            except Exception as error:
                logger.debug("%s: %s", self._agent.me.name, error)

    def killed(self, key: int, child: int, generation: int) -> None:
        """Hear that a child was killed on purpose."""

        def tell() -> None:
            plan = self._plans.get(key)
            if plan is not None and plan.leader is not None:
                plan.leader.ended(child, generation)

        self._later.post(tell)

    # Supervising.

    def begin(self, spec: Spec, started: Future[None]) -> None:
        """Supervise from now on. The future completes when all is there, or could not be made."""
        state = State.of(
            (
                *(spec.key, tuple(child.name for child in spec.children), 1, self._agent.me.id, 0),
                *(((self._agent.me.name, self._agent.me.incarnation),), (), ""),
                tuple(("waiting", 1, "", None) for _ in spec.children),
            )
        )

        def lead() -> None:
            self.hear(state, spec)
            plan = self._plans[spec.key]
            plan.leader = self._leader(plan, spec, started)
            plan.leader.look()

        self._later.post(lead)

    def fail_start(self, key: int, error: Exception) -> None:
        """Give up a supervision that has not started yet. Called later, in the thread for that."""
        plan = self._plans.get(key)
        if plan is not None and plan.leader is not None:
            plan.leader.fail_start(error)

    def _leader(self, plan: _Plan, spec: Spec, started: Future[None] | None) -> Leader:
        return Leader(
            self._agent,
            spec,
            plan.state,
            plan.heard_at,
            self._remote,
            self.snapshots,
            self.hear,
            started,
        )

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
        """Look who is there. Called when somebody has come or gone."""
        self._later.post(self._look)

    def _is_leaving(self) -> bool:
        return self._agent.status.is_leaving or self._agent.status.is_closed

    def _look(self) -> None:
        if self._is_leaving():
            return
        for plan in list(self._plans.values()):
            spec, state = plan.spec, plan.state
            first = next((one for one in state.keepers if is_alive(self._agent, one)), None)
            if spec is None or first is None or first[1] != self._agent.me.incarnation:
                self._retire(plan)
            elif plan.leader is None or not plan.leader.leads(state):
                self._retire(plan)
                gone = next(iter(state.keepers))[0]
                names = ", ".join(map(repr, state.names))
                logger.warning(
                    "%s: supervises %s from now on: %r is gone", self._agent.me.name, names, gone
                )
                plan.leader = self._leader(plan, spec, None)
            if plan.leader is not None:
                plan.leader.look()
            else:
                self._ask_owners(plan)
        self._settle()

    def _ask_owners(self, plan: _Plan) -> None:
        """Ask owners that were lost here by mistake, and met again, for usable references."""
        for name, child in zip(plan.state.names, plan.state.children, strict=True):
            owner = self._agent.directory.known(child.owner)
            is_void = child.is_running and not (child.rref and is_usable(child.rref))
            if not is_void or owner is None:
                plan.asked.pop(name, None)
            elif plan.asked.get(name) != owner.incarnation:
                plan.asked[name] = owner.incarnation
                call = self._agent.call_async(child.owner, self._remote.state_of, (name,))
                call.add_done_callback(self._on_answer)

    def _on_answer(self, answer: torch.futures.Future[Any]) -> None:
        with contextlib.suppress(Exception):  # the owner was lost again, or will not say
            plain = answer.value()
            if plain is not None:
                self.hear(State.of(plain))

    @staticmethod
    def _retire(plan: _Plan) -> None:
        leader, plan.leader = plan.leader, None
        if leader is not None:
            leader.retire()

    def close(self) -> None:
        """The agent has shut down."""
        with self._lock:
            awaited, self._awaited = self._awaited, []
        self._listening.close(0)
        for _, future in awaited:
            complete_with(future, self._agent.status.closed_error())
