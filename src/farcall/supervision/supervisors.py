"""The supervisions that one worker knows of. It supervises those that it is the first keeper of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farcall.errors import Cancelled, OwnerDied, RpcTimeout
from farcall.ids import RefId, original
from farcall.log import get_logger
from farcall.protocol.succession import Edition, Editions, Keeper, Term, successor
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.membership.roster import Listener
from farcall.supervision.leader import Leader, is_alive
from farcall.supervision.plans import Answer, Handler, Remote, Spec, State, is_usable
from farcall.supervision.snapshots import Snapshots
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
        # The term of a supervisor that is gone, and the successor that was asked for its last news.
        self.consulted: tuple[Term | None, Keeper | None] = (None, None)
        self.met: dict[int, int] = {}  # worker -> the last meeting in which it was told and asked


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
        self._made: dict[int, Editions[RefId]] = {}  # children here
        self._listener: Listener | None = None
        self._listening = BriefThreads(f"farcall-supervise-{agent.me.name}", 1)
        self.snapshots = Snapshots()
        agent.names.on_killed = self._on_killed

    # What is known.

    def hear(self, state: State, spec: Spec | None = None, passes_on: bool = False) -> Answer:
        """Hear how a supervision is, and how it is to be. Only what is newer counts.

        Args:
            passes_on: it does not come from the supervisor, so that the end is told to all others.
        """
        with self._lock:
            plan = self._plans.get(state.key)
            was_over = plan is not None and plan.state.is_over
            if plan is None:
                plan = self._plans[state.key] = _Plan(state)
                names = {name: (state.key, n) for n, name in enumerate(state.names)}
                # What is over may be heard of after what has its names now.
                first, last = (names, self._names) if state.is_over else (self._names, names)
                self._names = {**first, **last}
                self._discard_oldest()
            elif state.order > plan.state.order:
                plan.state, plan.heard_at = state, time.monotonic()
            elif state.order == plan.state.order:
                plan.state = plan.state.plus(state)
            plan.spec = plan.spec or spec
            heard, state = state, plan.state
            if state.is_over:
                plan.spec = None
            made = self._made.setdefault(state.key, Editions())
            outdated = made.drop_outdated(state)
            missing = made.missing(state, self._agent.me.name)
        self._end(outdated)
        if state.is_over:
            self.snapshots.discard(state.key)
            if not was_over:
                self._later.post(partial(self._pass_on, state, to_keepers=passes_on))
        else:
            self._listen()
        self._settle()
        self.look_soon()
        if state.order > heard.order:
            return Answer(other=state)
        return Answer(missing=tuple(missing))

    def _discard_oldest(self) -> None:
        over = [key for key, plan in self._plans.items() if plan.state.is_over]
        for key in over[: max(0, len(over) - MOST_ENDED)]:
            del self._plans[key]
            self._made.pop(key, None)
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

    def note_made(self, key: int, child: int, edition: Edition, ref: RefId) -> None:
        """Note that a child is to be made here.

        Raises:
            OwnerDied: another one is to be made, or was.
        """
        with self._lock:
            plan = self._plans.get(key)
            made = self._made.setdefault(key, Editions())
            counts, outdated = made.make(child, edition, ref, None if plan is None else plan.state)
        self._end(outdated)
        if not counts:
            raise OwnerDied(self._agent.me.name, "another object was made in place of this one")

    def _end(self, outdated: list[RefId]) -> None:
        for ref in outdated:
            place = self._agent.references.place_of(ref)
            if place is not None:
                why = "its supervisor has ended the object"
                place.kill(OwnerDied(self._agent.me.name, why))

    def _on_killed(self, ref: RefId) -> None:
        """The user has killed an object: if it is a child, it is not made again."""
        with self._lock:
            editions = [(key, made.killed(ref)) for key, made in self._made.items()]
            found = next(((key, one) for key, one in editions if one is not None), None)
            if found is None:
                return
            key, (child, edition) = found
            keepers = self._plans[key].state.keepers if key in self._plans else ()
        for name, _ in keepers:
            try:
                call = self._remote.killed, (key, child, tuple(edition))
                self._agent.call_async(name, *call).add_done_callback(lambda _: None)
            except Exception as error:
                logger.debug("%s: %s", self._agent.me.name, error)

    def killed(self, key: int, child: int, edition: Edition) -> None:
        """Hear that a child was killed on purpose."""

        def tell() -> None:
            plan = self._plans.get(key)
            if plan is not None and plan.leader is not None:
                plan.leader.ended(child, edition)

        self._later.post(tell)

    # Supervising.

    def begin(self, spec: Spec, started: Future[None]) -> None:
        """Supervise from now on. The future completes when all is there, or could not be made."""
        first = (1, -self._agent.me.id, 1)
        state = State.of(
            (
                *(spec.key, tuple(child.name for child in spec.children), 1, self._agent.me.id, 0),
                *(((self._agent.me.name, self._agent.me.incarnation),), (), ""),
                tuple(("waiting", first, "", None) for _ in spec.children),
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

    def _there(self) -> list[tuple[int, Keeper]]:
        live = [peer.worker for peer in self._agent.directory.live()]
        return [(one.id, (one.name, original(one.incarnation))) for one in (self._agent.me, *live)]

    def _look(self) -> None:
        if self._is_leaving():
            return
        for plan in list(self._plans.values()):
            spec, state = plan.spec, plan.state
            first = successor(state.keepers, partial(is_alive, self._agent), self._there())
            if spec is None or first[1] != self._agent.me.incarnation:
                self._retire(plan)
            elif plan.leader is None or not plan.leader.leads(state):
                self._retire(plan)
                gone = next(iter(state.keepers))[0]
                names = ", ".join(map(repr, state.names))
                logger.warning(
                    "%s: supervises %s from now on: %r is gone", self._agent.me.name, names, gone
                )
                plan.leader = self._leader(plan, spec, None)
            self._exchange(plan)
            if plan.leader is not None:
                plan.leader.look()
            else:
                self._ask_owners(plan)
                self._consult(plan, first)
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
                self._ask(child.owner, self._remote.state_of, (name,), self._on_answer)

    def _ask(
        self,
        to: str,
        function: Handler,
        args: tuple[Any, ...],
        done: Callable[[torch.futures.Future[Any]], None],
    ) -> None:
        with contextlib.suppress(Exception):  # it was lost again, or this worker leaves
            self._agent.call_async(to, function, args).add_done_callback(done)

    def _consult(self, plan: _Plan, first: Keeper) -> None:
        """Ask the successor of a supervisor that is gone for its last state.

        Two workers that have heard different states may take each other for the successor, so it
        is told of this one, too. With the plan, if it is here: one that heard of an end, which the
        supervisor before did not, has dropped its own.
        """
        state, at = plan.state, (plan.state.term, first)
        if state.is_over or first == state.keepers[0] or plan.consulted == at:
            return
        plan.consulted = at
        for peer in self._agent.directory.live():
            is_first = original(peer.incarnation) == first[1]
            if is_first and peer.worker is not self._agent.me:
                self._ask(peer.name, self._remote.state_of, (state.names[0],), self._on_answer)
                bare = partial(self._tell_barely, peer.name, plan.spec, state)
                self._tell_successor(peer.name, plan.spec, state.plain(), bare)

    def _tell_barely(
        self, to: str, spec: Spec | None, state: State, answer: torch.futures.Future[Any]
    ) -> None:
        """Tell a worker of a state that it could not take: it has not met an owner."""
        try:
            answer.value()
        except Exception:
            self._tell_successor(to, spec, state.plain(is_bare=True), lambda _: None)

    def _tell_successor(
        self,
        to: str,
        spec: Spec | None,
        plain: tuple[Any, ...],
        done: Callable[[torch.futures.Future[Any]], None],
    ) -> None:
        if spec is None:
            self._ask(to, self._remote.hear, (plain, False), done)
        else:
            self._ask(to, self._remote.adopt, (spec.plain(), plain), done)

    def _exchange(self, plan: _Plan) -> None:
        """Tell those that were lost by mistake, and met again, of the state here, and ask them."""
        for peer in self._agent.directory.live():
            name, number = peer.name, original(peer.incarnation)
            if peer.incarnation != number and plan.met.get(number) != peer.incarnation:
                plan.met[number] = peer.incarnation
                self._ask(
                    name, self._remote.hear, (plan.state.plain(is_bare=True), True), self._on_news
                )

    def _pass_on(self, state: State, *, to_keepers: bool) -> None:
        """Tell others of the end: its supervisor may not reach them, and tells it once."""
        me, keepers = self._agent.me, {number for _, number in state.keepers}
        for peer in self._agent.directory.live():
            is_told = original(peer.incarnation) in keepers and not to_keepers
            if peer.worker is not me and not is_told and state.leader_id != me.id:
                args = (state.plain(), to_keepers)
                self._ask(peer.name, self._remote.hear, args, lambda _: None)

    def _on_news(self, answer: torch.futures.Future[Any]) -> None:
        with contextlib.suppress(Exception):
            other = Answer.of(answer.value()).other
            if other is not None:
                self.hear(other, passes_on=True)

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
