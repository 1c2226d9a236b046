"""A simulated worker's questions to the store, as `runtime/membership/lookup.py` for an agent.

Judges by LOOK-1 to LOOK-4 what the machine says.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from farcall.ids import Worker
from farcall.protocol.lookup import (
    MOST_PATIENCE,
    MOST_STUCK,
    REMIND_SECONDS,
    STUCK_SECONDS,
    LookupMachine,
    Round,
    Step,
)
from simulator.agenda import Agenda
from simulator.directory.oracle import DirectoryOracle
from simulator.directory.world import Client, Mode, Node, Store

LOOK_AGAIN = 1.0  # seconds between looks at a question
LOOKS = [STUCK_SECONDS * patience for patience in (1, 2, 4, MOST_PATIENCE)]  # when one may say more
PROBE_SECONDS = 1.0  # for a connection to the store
LONGEST_ANSWER = 100.0  # seconds, of a slow store that several questions wait for
LEADS_NOWHERE = 150.0  # seconds after which the system gives a connection up


class Answer(NamedTuple):
    """The end of a question."""

    asked: bool
    worker: Worker | None = None


Then = Callable[[Answer], None]


class Waiting(NamedTuple):
    """A caller that wants an answer.

    Attributes:
        deadline: when it waits no longer.
        then: told how the question has ended.
    """

    deadline: float
    then: Then


class Question:
    """A question that is open."""

    def __init__(self, key: str | int, asked_at: float) -> None:
        self.key = key
        self.asked_at = asked_at
        self.joined_at = asked_at
        self.waiting: list[Waiting] = []


class Asking:
    """The questions of one worker.

    Args:
        calm: when no connection leads nowhere any more.
    """

    def __init__(
        self,
        node: Node,
        machine: LookupMachine[Question],
        store: Store,
        agenda: Agenda[Node],
        random: Random,
        oracle: DirectoryOracle,
        calm: float,
    ) -> None:
        self._node = node
        self.machine = machine
        self._store = store
        self._agenda = agenda
        self._clock = agenda.clock
        self._random = random
        self._oracle = oracle
        self._calm = calm
        self._client = Client(store.number)
        self._latest = 0
        self._queues: defaultdict[int, deque[Question]] = defaultdict(deque)
        self._busy: dict[int, float] = {}  # connections, and since when each is asked
        self._open: list[Question] = []
        self._alarm = math.inf  # when a caller wakes

    def find(self, key: str | int, deadline: float, then: Then) -> None:
        """Ask for a worker up to a deadline."""
        self._look()
        mine = Question(key, self._clock.now)
        question, connection = self.machine.ask(mine)
        if connection is not None:
            if any(one.key == key for one in self._open):
                self._oracle.violate("LOOK-1", f"{self._node} asks for {key} twice at once")
            self._open.append(question)
            self._ask_by(connection, question)
        question.joined_at = self._clock.now
        question.waiting.append(Waiting(deadline, then))
        self._set_alarm()

    def remind_at(self, moment: float, last: Answer | None = None) -> None:
        """Ask for this worker's own name at that moment, and every 20 seconds from then on.

        Questions of which nothing would come are left out, until the store is different.

        Args:
            last: what the question before has come to.
        """
        change = self._store.changes_at(self._clock.now)
        is_refused = last is not None and not last.asked and self._store.mode is Mode.DEAD
        is_gone = change == math.inf and self._store.mode is not Mode.UP
        if is_gone or (not self._busy and (is_refused or self._is_well)):
            if change == math.inf:
                return
            moment += max(0, math.ceil((change - moment) / REMIND_SECONDS)) * REMIND_SECONDS
        self._at(moment, self._remind)

    def _remind(self) -> None:
        deadline = self._clock.now + REMIND_SECONDS
        self.find(self._node.me.name, deadline, partial(self.remind_at, deadline))

    @property
    def _is_well(self) -> bool:
        """Return whether each question would get its answer, and the store knows this worker."""
        client, store, me = self._client, self._store, self._node.me
        is_connected = client.number == store.number and not client.ends_at
        return is_connected and store.mode is Mode.UP and store.records.get(me.name) is me

    def _set_alarm(self) -> None:
        """See to it that a caller wakes at its deadline, or when another connection may be due.

        A caller of an agent looks each second, and would find nothing to do before.
        """
        now = self._clock.now
        deadline = min(one.deadline for question in self._open for one in question.waiting)
        busy = now - self._busy.get(self._latest, now)
        due = next((seconds for seconds in LOOKS if seconds > busy), math.inf) - busy
        moment = min(deadline, now + due + LOOK_AGAIN * self._random.random())
        if not now <= self._alarm <= moment:
            self._alarm = moment
            self._at(moment, self._wake)

    def _wake(self) -> None:
        now = self._clock.now
        if now < self._alarm:
            return  # another alarm was set
        self._alarm = math.inf
        for question in list(self._open):
            for one in [one for one in question.waiting if one.deadline <= now]:
                question.waiting.remove(one)
                one.then(Answer(asked=False))
        self._look_on()

    def _look_on(self) -> None:
        """Have a question that still waits look again, as a thread does when it wakes."""
        if any(question.waiting for question in self._open):
            self._look()
            self._set_alarm()

    def check_end(self) -> None:
        """Judge whether all has an answer after the store has answered for some time."""
        late = [one.key for one in self._open if self._clock.now - one.asked_at > LONGEST_ANSWER]
        if late:
            self._oracle.violate("LOOK-4", f"{self._node} has no answer for {late}")

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._agenda.at(moment, self._node, act)

    def _soon(self, act: Callable[[], None]) -> None:
        seconds = self._store.seconds if self._random.random() < 0.5 else 0.0
        self._at(self._clock.now + seconds, act)

    def _look(self) -> None:
        anew = self.machine.look(self._clock.now)
        if anew is not None:
            self._begin(anew)
        since = self._busy.get(self._latest)
        stuck = len(self._busy) - (since is not None)
        if stuck > MOST_STUCK:
            self._oracle.violate("LOOK-3", f"{stuck} connections of {self._node} are stuck")
        elif since is not None and self._clock.now - since >= LOOKS[-1] and stuck < MOST_STUCK:
            self._oracle.violate("LOOK-4", f"{self._node} asks by a connection that is stuck")

    def _begin(self, anew: Round[Question]) -> None:
        self._latest = anew.connection
        for question in anew.questions:
            self._ask_by(anew.connection, question)

    def _ask_by(self, connection: int, question: Question) -> None:
        self._queues[connection].append(question)
        if connection not in self._busy:
            self._go_on(connection)

    def _go_on(self, connection: int) -> None:
        """Have a connection, which is free, ask the next question."""
        queue = self._queues[connection]
        while queue:
            question = queue.popleft()
            step = self.machine.begins(question, connection, self._clock.now)
            if step is Step.DROP:
                continue
            self._busy[connection] = self._clock.now
            self._ask_store(question, connection, reopen=step is Step.REOPEN)
            return

    def _ask_store(self, question: Question, connection: int, *, reopen: bool) -> None:
        end = partial(self._end, question, connection)
        again = partial(self._reopen, question.key, end)
        if reopen:
            again()
        else:
            self._ask(question.key, lambda answer: end(answer) if answer.asked else again())

    def _end(self, question: Question, connection: int, answer: Answer) -> None:
        since = self._busy.pop(connection)
        found = answer.worker is not None if answer.asked else None
        if not self.machine.ends(question, connection, found=found):
            self._queues[connection].appendleft(question)
        else:
            if found is False and question.joined_at > since:
                self._oracle.violate("LOOK-6", f"{self._node} hears what held before it asked")
            if connection != self._latest:
                self._oracle.violate("LOOK-2", f"{self._node} hears an old connection")
            self._open.remove(question)
            for waiting in question.waiting:
                waiting.then(answer)
        if connection != self._latest:
            self._look_on()  # one more may get stuck
        self._go_on(connection)

    # Operations of a client of the store. None is late: a process that stands still is.

    def _ask(self, key: str | int, then: Then) -> None:
        client, store = self._client, self._store
        if client.ends_at:
            self._at(max(client.ends_at, self._clock.now), lambda: then(Answer(asked=False)))
        elif store.mode is Mode.DARK:
            self._at(store.changes_at(self._clock.now) + 0.01, partial(self._ask, key, then))
        elif store.mode is Mode.DEAD or client.number != store.number:
            self._soon(lambda: then(Answer(asked=False)))
        else:
            self._soon(lambda: self._read(key, client, then))

    def _read(self, key: str | int, client: Client, then: Then) -> None:
        if self._store.mode is Mode.UP and client.number == self._store.number:
            worker = self._store.find(key)
            self._soon(lambda: then(Answer(True, worker)))
        else:
            self._ask(key, then)

    def _reopen(self, key: str | int, then: Then) -> None:
        failed = partial(then, Answer(asked=False))
        if self._store.mode is Mode.UP:
            self._soon(lambda: self._register(key, then))
        else:
            is_dark = self._store.mode is Mode.DARK
            self._at(self._clock.now + (PROBE_SECONDS if is_dark else 0.001), failed)

    def _register(self, key: str | int, then: Then) -> None:
        """Register anew, over a new connection, if the store does not know the worker.

        Other questions go by it only after that, see `Rendezvous.reopen`.
        """
        chance = self._random.random() if self._clock.now < self._calm else 1.0
        ends_at = min(self._clock.now + LEADS_NOWHERE, self._calm) if chance < 0.1 else 0.0
        if chance < 0.05:
            self._at(ends_at, partial(then, Answer(asked=False)))
        elif 0.1 <= chance < 0.25 or self._store.mode is not Mode.UP:
            self._soon(partial(then, Answer(asked=False)))  # it broke again just now
        else:
            me = self._node.me
            if self._node.alive:
                self._store.records.setdefault(me.name, me)
            self._client = Client(self._store.number, ends_at)
            self._ask(key, then)
