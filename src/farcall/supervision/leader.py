"""Supervises: the first keeper of a supervision makes its children, and makes them again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farcall.errors import OwnerDied, PeerLost, RpcTimeout
from farcall.ids import original
from farcall.log import get_logger
from farcall.protocol.succession import Edition, Keeper, Number, edition_now
from farcall.protocol.supervision import Candidate, Phase, choose
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.membership.peers import Peer
from farcall.supervision.plans import (
    Answer,
    ChildState,
    Handler,
    Remote,
    Spec,
    State,
    is_usable,
)
from farcall.supervision.snapshots import Snapshots

logger = get_logger("farcall")

ADOPTION_SECONDS = 2.0  # that others have to say that they could take over, before it starts
# A worker may not have met the owner of an object again yet, or was lost while it was asked.
AGAIN = (OwnerDied, PeerLost, RpcTimeout)
AGAIN_SECONDS = 0.5  # until it is asked again, if it is there
SNAPSHOT_KEEPERS = 2  # that have each snapshot, beside the owner and the supervisor


def is_alive(agent: Agent, keeper: Keeper) -> bool:
    """Return whether a worker has not been lost, as far as is known here."""
    if keeper[1] == agent.me.incarnation:
        return True
    peer = agent.directory.newest(keeper[1])
    return peer is not None and peer.lost is None


class Leader:
    """Supervises, for as long as it is the first keeper. All methods run in one thread.

    Args:
        state: as it was before.
        heard_at: when the state was heard of, in `time.monotonic()` seconds.
        publish: hears of each change, and of states of other supervisors, which are passed on.
        started: completes when all children are there for the first time, or can't be made; None of
            a worker that has taken over.
    """

    def __init__(
        self,
        agent: Agent,
        spec: Spec,
        state: State,
        heard_at: float,
        remote: Remote,
        snapshots: Snapshots,
        publish: Callable[[State, Spec, bool], Answer],
        started: Future[None] | None,
    ) -> None:
        self._agent = agent
        self._me: Keeper = (agent.me.name, agent.me.incarnation)
        self._spec = spec
        self._state = state
        self._remote = remote
        self._snapshots = snapshots
        self._publish = publish
        self._started = started
        self._is_starting = started is not None
        self._later = agent.group.later
        self._is_retired = False
        self._is_patient = True  # with those that were asked to be keepers
        self._children = list(state.children)
        # Those that were asked to be keepers, in the order in which they take over.
        # Each with its present meeting: a worker that was lost by mistake is asked again.
        self._asked: dict[int, int] = {agent.me.incarnation: agent.me.incarnation}
        self._to_come = 0  # answers of those
        self._keepers = [keeper for keeper in state.keepers if is_alive(agent, keeper)]
        if self._me not in self._keepers:
            self._keepers.insert(0, self._me)
        for _, number in self._keepers:
            peer = agent.directory.newest(number)
            self._asked[number] = number if peer is None else peer.incarnation
        self._unplaced: dict[int, tuple[int, float]] = {}  # child -> generation, since when
        self._counts = [0] * len(self._children)  # of snapshots, of this generation
        self._lacks = [""] * len(self._children)  # why there was no snapshot the last time
        self._spread_to: dict[int, tuple[Number, set[str]]] = {}  # child -> those with a snapshot
        self._machine = spec.machine()
        if started is None:
            self._state = state._replace(epoch=state.epoch + 1, leader_id=agent.me.id, version=0)
            phases = [Phase(child.phase) for child in state.children]
            generations = [child.edition.generation for child in state.children]
            self._machine.resume(phases, generations, [heard_at - age for age in state.ages])
            snapshots.take_over(spec.key, self._state.term, [one.edition for one in self._children])
            for child, before in enumerate(state.children):
                if before.is_running:
                    self._begin_snapshots(child, before.edition.generation)
            self._tell()
        else:
            self._machine.begin()
            self._post(self._wait_no_longer, ADOPTION_SECONDS)

    def retire(self) -> None:
        """Do nothing any more: another worker supervises."""
        self._is_retired = True
        if self._started is not None and not self._started.done():
            self._started.set_result(None)  # references wait for what the other worker makes

    def leads(self, state: State) -> bool:
        """Return whether this worker supervises in a state."""
        return state.term == self._state.term

    # Events.

    def look(self) -> None:
        """Look who is there: somebody has come or gone, or time has passed."""
        if self._machine.is_over:
            return
        self._enlist()
        gone = [
            child
            for child, state in enumerate(self._children)
            if self._machine.phases[child] is Phase.RUNNING
            and (state.rref is None or not is_usable(state.rref))
        ]
        if gone:
            owners = ", ".join(sorted({repr(self._children[child].owner) for child in gone}))
            names = ", ".join(repr(self._spec.children[child].name) for child in gone)
            self._machine.lost(gone, f"{names} was lost with {owners}", time.monotonic())
        self._go_on()

    def ended(self, child: int, edition: Edition) -> None:
        """The user has killed a child."""
        if self._children[child].edition == edition:
            self._machine.ended(child, edition.generation)
            self._go_on()

    def _go_on(self) -> None:
        if self._machine.is_over:
            self._unplaced.clear()
        for child, generation in self._machine.take():
            self._unplaced[child] = (generation, time.monotonic())
        for child, (generation, since) in list(self._unplaced.items()):
            self._place(child, generation, since)
        self._tell()

    # Keepers.

    def _enlist(self) -> None:
        """Have all that are there keep what is needed to take over."""
        for peer in self._others():
            number = original(peer.incarnation)
            if self._asked.get(number) != peer.incarnation:
                self._asked.pop(number, None)  # it comes last now
                self._asked[number] = peer.incarnation
                self._to_come += 1
                call = self._remote.adopt, (self._spec.plain(), self._state.plain())
                self._call(peer.name, *call, partial(self._adopted, (peer.name, number)))

    def _others(self) -> list[Peer]:
        live = self._agent.directory.live()
        return [peer for peer in live if peer.worker is not self._agent.me]

    def _adopted(self, keeper: Keeper, answer: torch.futures.Future[Any]) -> None:
        self._to_come -= 1
        try:
            heard = Answer.of(answer.value())
        except AGAIN as error:
            logger.debug("%s: %r is asked again: %s", self._me[0], keeper[0], error)
            self._asked.pop(keeper[1], None)
            self._keepers = [one for one in self._keepers if one != keeper]
            self._post(self.look, AGAIN_SECONDS)
        except Exception as error:
            logger.info("%s: %r does not keep a supervision: %s", self._me[0], keeper[0], error)
        else:
            self._hear(heard)
            order = list(self._asked)
            keepers = {*self._keepers, keeper}
            self._keepers = sorted(keepers, key=lambda one: order.index(one[1]))
        self._tell()

    def _hear(self, answer: Answer) -> None:
        """Hear of a state that counts at another worker, or of what that does not have."""
        if answer.other is not None:
            self._publish(answer.other, self._spec, True)
        missing = [
            one for one in answer.missing if self._children[one.child].edition == one.edition
        ]
        for one in missing:
            if one.was_killed:
                self._machine.ended(one.child, one.edition.generation)
        dropped = [one.child for one in missing if not one.was_killed]
        if dropped:
            names = ", ".join(repr(self._spec.children[child].name) for child in dropped)
            why = f"another supervisor had {names} ended"
            self._machine.lost(dropped, why, time.monotonic())
        if missing:
            self._go_on()

    def _told(self, peer: Peer, version: int, answer: torch.futures.Future[Any]) -> None:
        """Another worker has heard of a version of the state, or could not."""
        try:
            self._hear(Answer.of(answer.value()))
        except AGAIN:
            self._post(partial(self._tell_again, peer, version), AGAIN_SECONDS)
        except Exception as error:
            logger.debug("%s: %s", self._me[0], error)

    def _tell_again(self, peer: Peer, version: int) -> None:
        if version == self._state.version and peer.lost is None:
            done = partial(self._told, peer, version)
            self._call(peer.name, self._remote.hear, (self._state.plain(), False), done)

    def _tell(self) -> None:
        """Tell everybody how it is now, if that is news."""
        machine, now = self._machine, time.monotonic()
        for child, state in enumerate(self._children):
            phase, generation = machine.phases[child], machine.generations[child]
            edition = edition_now(state.edition, phase, generation, self._state.term)
            rref = state.rref if phase is Phase.RUNNING else None
            self._children[child] = ChildState(phase.value, edition, state.owner, rref)
        self._keepers = [keeper for keeper in self._keepers if is_alive(self._agent, keeper)]
        news = self._state._replace(
            keepers=tuple(self._keepers),
            given_up=machine.given_up,
            children=tuple(self._children),
        )
        if news != self._state or not news.version:
            ages = tuple(now - time for time in machine.times)
            self._state = news._replace(version=news.version + 1, ages=ages)
            if machine.given_up and not self._is_starting:
                names = ", ".join(map(repr, news.names))
                logger.error("%s: gives %s up: %s", self._me[0], names, machine.given_up)
            mine = self._publish(self._state, self._spec, False)
            if mine.missing:
                self._post(partial(self._hear, mine))
            plain = self._state.plain()
            for peer in self._others():
                done = partial(self._told, peer, news.version + 1)
                self._call(peer.name, self._remote.hear, (plain, False), done)
            for child in range(len(self._children)):
                self._spread(child)
        self._note_start()

    def _wait_no_longer(self) -> None:
        self._is_patient = False
        self._note_start()

    def _note_start(self) -> None:
        is_there = all(phase is Phase.RUNNING for phase in self._machine.phases)
        if self._to_come and self._is_patient:
            return
        if is_there and self._started is not None and self._is_starting:
            self._is_starting = False
            if not self._started.done():
                self._started.set_result(None)

    # Children.

    def _place(self, child: int, generation: int, since: float) -> None:
        """Make a child on a worker, if there is one for it."""
        spec = self._spec.children[child]
        target = spec.where()
        waited = time.monotonic() - since
        is_open = bool(target.name) and self._agent.directory.can_ask(target.name)
        waits = is_open and generation > 1 and waited < self._spec.wait
        live = self._agent.directory.live()
        there = [Candidate(p.name, p.worker.id, p.worker.role) for p in live]
        load = Counter(state.owner for state in self._children if state.is_running)
        chosen = choose(target, there, load, self._me[0], waits=waits)
        if chosen is not None:
            del self._unplaced[child]
            self._make(child, generation, chosen.name)
        elif waits:
            self._post(self._go_on, self._spec.wait - waited)
        elif not self._agent.directory.can_ask(self._me[0]):  # nobody will come
            del self._unplaced[child]
            why = f"no worker of the role {target.role!r} is left"
            self._post(partial(self._made, child, generation, None, why))

    def _make(self, child: int, generation: int, owner: str) -> None:
        spec = self._spec.children[child]
        found = self._snapshots.get(self._spec.key, child)
        if generation > 1:
            logger.warning(
                "%s: makes %r again on %r, %s",
                self._me[0],
                spec.name,
                owner,
                "from its last snapshot" if found else "without a snapshot",
            )
        edition = Edition(*self._state.term, generation)
        self._children[child] = self._children[child]._replace(owner=owner, edition=edition)
        saved = (False, None) if found is None else (True, found[1])
        at = (child, tuple(edition), spec.name, spec.load)
        state = self._state.plain(is_bare=True)
        made = (spec.factory, spec.args, spec.kwargs, saved)
        try:
            call = self._remote.make, (at, state, *made), None, None, spec.concurrency
            rref: RRef[Any] = RRef.of(self._agent.remote(owner, *call))
        except Exception as error:
            self._post(partial(self._made, child, generation, None, error))
            return
        done = partial(self._made, child, generation, rref)
        self._call(owner, self._remote.wait_until_made, ("", rref), done)

    def _made(self, child: int, generation: int, rref: RRef[Any] | None, answer: Any) -> None:
        """A child was made, or could not be: the answer says so."""
        try:
            if rref is None:
                raise answer if isinstance(answer, Exception) else LookupError(answer)
            answer.value()
        except Exception as error:
            self._not_made(child, generation, error)
            return
        if self._machine.made(child, generation):
            self._children[child] = self._children[child]._replace(rref=rref)
            self._begin_snapshots(child, generation)
            self._spread(child)
        self._go_on()

    def _not_made(self, child: int, generation: int, error: Exception) -> None:
        name, owner = self._spec.children[child].name, self._children[child].owner
        if self._is_starting:
            self.fail_start(error)
            return
        why = f"{name!r} could not be made on {owner!r}: {type(error).__name__}: {error}"
        logger.warning("%s: %s", self._me[0], why)
        self._machine.failed(child, generation, why, time.monotonic())
        self._go_on()

    def fail_start(self, error: Exception) -> None:
        """Give up, unless all was made before. The caller of `supervise` hears of this."""
        if self._is_starting and not self._machine.is_over:
            assert self._started is not None
            complete_with(self._started, error)
            self._machine.given_up = f"it could not be made: {error}"
            self._go_on()

    # Snapshots.

    def _begin_snapshots(self, child: int, generation: int) -> None:
        self._counts[child] = 0
        every = self._spec.children[child].every
        if every:
            self._post(partial(self._take, child, generation), every)

    def _take(self, child: int, generation: int) -> None:
        """Take a snapshot of a child, unless it is another by now."""
        rref = self._children[child].rref
        is_same = self._machine.generations[child] == generation
        if rref is None or not is_same or self._machine.is_over:
            return
        spec, handle = self._spec.children[child], rref._handle
        done = partial(self._taken, child, generation)
        self._call(str(handle.to), self._remote.save, (handle, spec.save), done)

    def _taken(self, child: int, generation: int, answer: torch.futures.Future[Any]) -> None:
        every = self._spec.children[child].every
        self._post(partial(self._take, child, generation), every)
        try:
            state = answer.value()
        except Exception as error:
            name = self._spec.children[child].name
            if str(error) != self._lacks[child]:  # each time would fill the log
                self._lacks[child] = str(error)
                logger.warning("%s: no snapshot of %r: %s", self._me[0], name, error)
            return
        self._lacks[child] = ""
        self._counts[child] += 1
        number = (*self._state.term, generation, self._counts[child])
        self._snapshots.put(self._spec.key, child, number, state)
        self._spread(child)

    def _spread(self, child: int) -> None:
        """Have others keep the last snapshot of a child, too."""
        found = self._snapshots.get(self._spec.key, child)
        if found is None:
            return
        owner = self._children[child].owner
        others = [name for name, _ in self._keepers if name not in (self._me[0], owner)]
        number, have = self._spread_to.get(child, (found[0], set()))
        have = have & set(others) if number == found[0] else set()
        for name in others[:SNAPSHOT_KEEPERS]:
            if name not in have:
                call = self._remote.keep, (self._spec.key, child, *found)
                self._call(name, *call, _ignore)
        self._spread_to[child] = (found[0], {*have, *others[:SNAPSHOT_KEEPERS]})

    # Calls.

    def _call(
        self,
        to: str,
        function: Handler,
        args: tuple[Any, ...],
        done: Callable[[torch.futures.Future[Any]], None],
    ) -> None:
        """Call a function; what is done with the answer is done in this thread, later."""
        try:
            future = self._agent.call_async(to, function, args)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        if done is _ignore:
            future.add_done_callback(done)
        else:
            future.add_done_callback(lambda answer: self._post(partial(done, answer)))

    def _post(self, work: Callable[[], object], delay: float = 0.0) -> None:
        """Do something later, in this thread, if this worker still supervises then."""

        def do() -> None:
            if not (self._is_retired or self._agent.status.is_leaving):
                work()

        self._later.post(do, delay)


def _ignore(_: object) -> None:
    """Ignore an answer: a worker that did not hear of this change hears of the next, or is gone."""
