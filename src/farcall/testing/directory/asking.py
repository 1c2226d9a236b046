"""How a simulated worker asks the store: what `runtime/membership/lookup.py` is to an agent.

Judges by LOOK-1 to LOOK-4 what the machine says.
"""

from __future__ import annotations

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
from farcall.testing.agenda import Agenda
from farcall.testing.directory.oracle import DirectoryOracle
from farcall.testing.directory.world import Client, Mode, Node, Store

LOOK_AGAIN = 1.0  # seconds between looks at a question
PROBE_SECONDS = 1.0  # for a connection to the store
LONGEST_ANSWER = 100.0  # seconds, of a slow store that several questions wait for
LEADS_NOWHERE = 400.0  # seconds after which the system gives a connection up


class Answer(NamedTuple):
    """How a question ended."""

    asked: bool
    worker: Worker | None = None


Then = Callable[[Answer], None]


class Question:
    """A question that is open."""

    def __init__(self, key: str | int, asked_at: float) -> None:
        self.key = key
        self.asked_at = asked_at
        self.joined_at = asked_at
        self.answer: Answer | None = None
        self.waiting: list[Then] = []


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
        self._random = random
        self._oracle = oracle
        self._calm = calm
        self._client = Client(store.number)
        self._latest = 0
        self._queues: defaultdict[int, deque[Question]] = defaultdict(deque)
        self._busy: dict[int, float] = {}  # connections, and since when each is asked
        self._open: list[Question] = []

    def find(self, key: str | int, deadline: float, then: Then) -> None:
        """Ask for a worker up to a deadline."""
        self._look()
        mine = Question(key, self._now)
        question, connection = self.machine.ask(mine)
        if connection is not None:
            if any(one.key == key for one in self._open):
                self._oracle.violate("LOOK-1", f"{self._node} asks for {key} twice at once")
            self._open.append(question)
            self._ask_by(connection, question)
        waiting = [then]  # until its outcome

        def end(answer: Answer) -> None:
            if waiting:
                waiting.pop()(answer)

        def look() -> None:
            if waiting:
                if self._now >= deadline:
                    end(Answer(asked=False))
                    return
                self._look()
                self._at(min(deadline, self._now + LOOK_AGAIN), look)

        if question.answer is not None:
            end(question.answer)
        else:
            question.joined_at = self._now
            question.waiting.append(end)
            self._at(min(deadline, self._now + LOOK_AGAIN), look)

    def remind(self) -> None:
        """Ask for this worker's own name now and then."""
        deadline = self._now + REMIND_SECONDS
        again = partial(self._at, deadline, self.remind)
        self.find(self._node.me.name, deadline, lambda _: again())

    def check_end(self) -> None:
        """Judge whether all has an answer after the store has answered for some time."""
        late = [one.key for one in self._open if self._now - one.asked_at > LONGEST_ANSWER]
        if late:
            self._oracle.violate("LOOK-4", f"{self._node} has no answer for {late}")

    @property
    def _now(self) -> float:
        return self._agenda.clock.now

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._agenda.at(moment, self._node, act)

    def _soon(self, act: Callable[[], None]) -> None:
        self._at(self._now + self._random.choice((0.0, self._store.seconds)), act)

    def _look(self) -> None:
        anew = self.machine.look(self._now)
        if anew is not None:
            self._begin(anew)
        since, stuck = (
            self._busy.get(self._latest, self._now),
            len(self._busy.keys() - {self._latest}),
        )
        if stuck > MOST_STUCK:
            self._oracle.violate("LOOK-3", f"{stuck} connections of {self._node} are stuck")
        elif self._now - since >= MOST_PATIENCE * STUCK_SECONDS and stuck < MOST_STUCK:
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
            step = self.machine.begins(question, connection, self._now)
            if step is Step.DROP:
                continue
            self._busy[connection] = self._now
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
                self._oracle.violate("LOOK-6", f"{self._node} is told what was so before it asked")
            if connection != self._latest:
                self._oracle.violate("LOOK-2", f"{self._node} hears an old connection")
            question.answer = answer
            self._open.remove(question)
            for then in question.waiting:
                then(answer)
        self._go_on(connection)

    # Operations of a client of the store. None is late: a process that stands still is.

    def _ask(self, key: str | int, then: Then) -> None:
        client, store = self._client, self._store
        if client.ends_at:
            self._at(max(client.ends_at, self._now), lambda: then(Answer(asked=False)))
        elif store.mode is Mode.DARK:
            self._at(store.changes_at(self._now) + 0.01, partial(self._ask, key, then))
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
            self._at(self._now + (PROBE_SECONDS if is_dark else 0.001), failed)

    def _register(self, key: str | int, then: Then) -> None:
        """There is a connection again. Who is unknown to the store registers anew."""
        chance = self._random.random() if self._now < self._calm else 1.0
        ends_at = min(self._now + LEADS_NOWHERE, self._calm) if chance < 0.1 else 0.0
        self._client = Client(self._store.number, ends_at)
        if ends_at:
            self._at(ends_at, partial(then, Answer(asked=False)))
        elif chance < 0.25 or self._store.mode is not Mode.UP:
            self._soon(partial(then, Answer(asked=False)))  # it broke again just now
        else:
            me = self._node.me
            if self._node.alive:
                self._store.records.setdefault(me.name, me)
            self._ask(key, then)
