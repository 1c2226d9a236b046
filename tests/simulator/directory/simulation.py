"""One schedule of the directory: workers meet, part and come again, at moments drawn from a seed.

The machines are `farcall.protocol.directory`'s and `farcall.protocol.lookup`'s, as the runtime and
the handshake run them. After `calm` seconds nothing goes wrong any more; then all call each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import msgspec

from farcall.ids import MAX_MEETINGS, Worker, original
from farcall.protocol.directory import DISCARD_SECONDS, Key, Standing
from farcall.protocol.lookup import REMIND_SECONDS
from simulator.agenda import Agenda
from simulator.directory.asking import Answer, Asking
from simulator.directory.meetings import Meetings
from simulator.directory.oracle import DirectoryOracle
from simulator.directory.planted import DirectoryBug, directory_of, lookup_of
from simulator.directory.world import Change, Mode, Node, Record, Store
from simulator.schedule import Result, Schedule, Script

MAX_EVENTS = 20_000
SETTLING = 120.0  # seconds after which all that went wrong has been noticed, and made good
CALLS_AT_THE_END = 2
SPANS = (30.0, 30.0, 120.0, 120.0, 2200.0)  # seconds in which things go wrong
EPISODE = DISCARD_SECONDS + 50.0  # in long spans much happens at once, and nothing for as long


def simulate_directory(
    seed: int, *, bug: DirectoryBug | None = None, script: Script | None = None
) -> Result:
    """Run one schedule.

    Args:
        seed: equal arguments give equal results.
        bug: a mistake to plant in a machine, to see it found.
        script: see `Schedule`. The inputs are calls, and what befalls the workers and the store.
    """
    return _DirectorySchedule(seed, bug, script).run()


class _DirectorySchedule(Schedule):
    def __init__(self, seed: int, bug: DirectoryBug | None, script: Script | None) -> None:
        super().__init__(seed, script)
        self._bug = bug
        random = self._random
        self._is_open = random.random() < 0.7
        self._calm = random.choice(SPANS)
        self._slowest = random.choice((0.001, 0.1, 2.0, 2.0))
        self._agenda: Agenda[Node] = Agenda(self._clock, random, self._slowest)
        self._oracle = DirectoryOracle()
        self._violations = self._oracle.violations
        self._store_returns = random.random() < 0.85
        self._store = Store(self._draw_store(), random.choice((0.001, 0.3, 2.4, 6.0)))
        self._retries = random.choice((0.3, 1.0))  # chance to call a lost worker again
        self._nodes: dict[int, Node] = {}
        self._asking: dict[Node, Asking] = {}
        self._meetings = Meetings(
            self._nodes, self._agenda, random, self._oracle, self._slowest, self._note, self._retry
        )
        size = random.choice((2, 2, 3, 4))
        for number in range(size):
            self._new_node(f"w{number}", number)
        for node in self._nodes.values():
            self._meet_at_start(node)
        if random.random() < 0.03:
            self._begin_near_the_last_meeting()
        elif random.random() < 0.1:
            self._begin_with_a_loss()
        self._draw(size)

    # Random choices.

    def _draw_store(self) -> list[Change]:
        random, now, changes = self._random, 0.0, []
        while random.random() < 0.7:
            now += random.uniform(0.0, self._calm / 2)
            mode = random.choice((Mode.DARK, Mode.DEAD))
            longest = random.choice((0.1, 3.0, 30.0, min(120.0, self._calm / 3)))
            back = now + longest * random.random()
            if back >= self._calm:
                break
            is_new = mode is Mode.DEAD or random.random() < 0.3
            if self._happens():
                changes += [Change(now, mode, False), Change(back, Mode.UP, is_new)]
            now = back
        if not self._store_returns:
            changes.append(Change(self._calm, random.choice((Mode.DARK, Mode.DEAD)), False))
        return changes

    def _draw(self, size: int) -> None:
        random, nodes = self._random, list(self._nodes.values())
        somebody = Node(-1, nodes[0].me, nodes[0].machine)  # of events outside all processes
        for change in self._store.changes:
            self._agenda.at(change.moment, somebody, partial(self._change_store, change))
        rate = random.choice((1, 1, 1, 3)) * size
        events: list[Callable[[], None]] = [self._cut, self._break_a_link, self._stand_still]
        events += [self._crash, self._leave] if random.random() < 0.6 else []
        for _ in range(random.randrange(2 * rate + 1)):
            self._input(somebody, random.choice(events))
        for _ in range(2 * rate):
            self._input(somebody, self._call_anybody)
        # Questions queue at a store that is slow, and a caller may give up before its turn comes.
        attempts = CALLS_AT_THE_END if self._store.seconds < 1.0 else 3 * CALLS_AT_THE_END
        for attempt in range(attempts):
            moment = self._calm + SETTLING + 15.0 * attempt
            self._agenda.at(moment, somebody, self._all_call)
        end = self._calm + SETTLING + 15.0 * attempts + 80.0
        self._agenda.at(end, somebody, self._check_end)
        self._end = end

    def _input(self, somebody: Node, act: Callable[[], None]) -> None:
        draw, (episodes, longest) = self._random.random, divmod(self._calm, EPISODE)
        moment = EPISODE * int((episodes + 1.0) * draw()) + longest * draw()
        if self._happens():
            self._agenda.at(moment, somebody, partial(self._perform, self._inputs, act))

    def _new_node(self, name: str, id: int) -> Node:
        number = len(self._nodes)
        incarnation = 2 * number + 1
        records = directory_of(self._bug)(Record, is_open=self._is_open)
        node = Node(
            number, Worker(name, id, incarnation, (f"tcp:{number}",), pid=number + 1), records
        )
        self._nodes[incarnation] = node
        questions = lookup_of(self._bug)()
        self._asking[node] = Asking(
            node, questions, self._store, self._agenda, self._random, self._oracle, self._calm
        )
        records.add(node.me)
        self._store.records[name] = node.me
        if self._is_open:
            delay = REMIND_SECONDS * self._random.random()
            self._asking[node].remind_at(self._clock.now + delay)
        return node

    def _meet_at_start(self, node: Node) -> None:
        """Learn who is there; where workers come and go, perhaps of some later."""
        for other in self._nodes.values():
            if not self._is_open or self._random.random() < 0.5:
                node.machine.add(other.me)

    def _begin_near_the_last_meeting(self) -> None:
        one, other, *_ = self._nodes.values()
        meeting = MAX_MEETINGS - self._random.choice((1, 2))
        for node, peer in ((one, other), (other, one)):
            node.machine.add(peer.me)
            record = node.machine.newest(peer.incarnation)
            assert record is not None
            self._oracle.superseded(node, record, 0.0)
            record.loss_cause = "long ago"
            self._meetings.on_peer_lost(node, record)
            node.machine.meet_again(peer.incarnation, meeting, 0.0)

    def _begin_with_a_loss(self) -> None:
        """Let one worker lose another, which may know nothing of it."""
        one, other, *_ = self._nodes.values()
        record = one.machine.add(other.me)
        self._at(0.0, one, partial(self._meetings.declare_lost, one, record, "long ago"))

    def _play(self) -> None:
        self._note("the group is", "open;" if self._is_open else "fixed;", *self._nodes.values())
        for node, act in islice(self._agenda, MAX_EVENTS):
            if node.alive:
                act()
            if self._violations or self._clock.now >= self._end:
                break

    def _at(self, moment: float, node: Node, act: Callable[[], None]) -> None:
        self._agenda.at(moment, node, act)

    # Calls.

    def _call_anybody(self) -> None:
        nodes = list(self._nodes.values())
        node, to = self._random.choice(nodes), self._random.choice(nodes).me
        key: Key = self._random.choice((to.name, to.id, to.info))
        timeout = self._random.choice((0.1, 5.0, 60.0))
        if node.stands_until > self._clock.now:
            self._at(self._clock.now, node, partial(self._call, node, key, timeout))
        elif node.alive:
            self._call(node, key, timeout)

    def _all_call(self) -> None:
        """Have all call all others, except where a link leads to one and each finds the other."""
        living = [node for node in self._nodes.values() if node.alive]
        for node in living:
            linked = [link.acceptor for link in node.links if link in link.acceptor.links]
            for other in living:
                is_well = other in linked and _finds(node, other) and _finds(other, node)
                if other is not node and not is_well:
                    self._call(node, other.me.name, 70.0)

    def _call(self, node: Node, key: Key, timeout: float) -> None:
        deadline = self._clock.now + timeout
        self._note(node, "calls", key)
        found = node.machine.resolve(key)
        self._oracle.resolved(node, found, asked=False)
        if found.standing is Standing.ASK:
            name = key if isinstance(key, str | int) else key.name
            self._asking[node].find(name, deadline, partial(self._on_answer, node, key, deadline))
        elif found.standing is Standing.KNOWN and found.party is not None:
            self._meetings.use(node, found.party, deadline)

    def _on_answer(self, node: Node, key: Key, deadline: float, answer: Answer) -> None:
        said = answer.worker if answer.asked else "no answer in time"
        self._note(node, "hears of the store, for", key, said and said)
        record = None if answer.worker is None else node.machine.add(answer.worker)
        if not answer.asked:
            record = self._ask_members(node, key)
        self._oracle.check(node)
        if record is None or record.loss_cause is not None:
            found = node.machine.resolve(key, asked=True)
            self._oracle.resolved(node, found, asked=True)
            record = found.party
        if record is not None and record.loss_cause is None:
            self._meetings.use(node, record, deadline)

    def _ask_members(self, node: Node, key: Key) -> Record | None:
        """Ask a linked member, where the store is silent, whom it knows: see `Members`."""
        for link in node.links:
            other = link.other(node)
            known = other.machine.known(key) if other.alive else None
            if known is not None and known.loss_cause is None and self._random.random() < 0.5:
                incarnation = original(known.worker.incarnation)
                self._note(other, "tells", node, "of", known.worker)
                return node.machine.told(
                    msgspec.structs.replace(known.worker, incarnation=incarnation)
                )
        return None

    def _retry(self, node: Node, record: Record) -> None:
        """Call again when a worker is lost, as some users do."""
        if self._random.random() < self._retries:
            call = partial(self._call, node, record.worker.name, 20.0)
            self._meetings.soon(node, call)

    # Events.

    def _change_store(self, change: Change) -> None:
        new = "and knows no worker" if change.is_new else ""
        self._note("the store is", change.mode.value, new)
        self._store.change(change)

    def _somebody(self) -> Node | None:
        living = [node for node in self._nodes.values() if node.alive]
        return self._random.choice(living) if living else None

    def _cut(self) -> None:
        one, other = self._random.choices(list(self._nodes.values()), k=2)
        longest = self._random.choice((0.5, 10.0, 2 * self._calm, 2 * self._calm))
        until = self._clock.now + longest * self._random.random()
        self._note("nothing gets through between", one, "and", other, "until", f"{until:.1f}")
        self._meetings.cuts[frozenset((one.incarnation, other.incarnation))] = min(
            until, self._calm
        )
        for node in (one, other):
            for link in node.links:
                if link.other(node) in (one, other) and self._random.random() < 0.7:
                    self._meetings.tell_end(node, link)

    def _break_a_link(self) -> None:
        node = self._somebody()
        if node is None or not node.links:
            return
        link = self._random.choice(node.links)
        self._note("the link of", link.dialler, "to", link.acceptor, "breaks")
        self._meetings.tell_end(link.dialler, link)
        self._meetings.tell_end(link.acceptor, link)

    def _stand_still(self) -> None:
        node = self._somebody()
        if node is not None:
            seconds = self._random.choice((0.1, 1.0, 10.0, 60.0)) * self._random.random()
            self._note(node, "stands still for", f"{seconds:.2f} s")
            node.stands_until = min(self._clock.now + seconds, self._calm)

    def _crash(self) -> None:
        linked = [node for node in self._nodes.values() if node.links and node.alive]
        node = self._random.choice(linked) if linked else self._somebody()
        if node is not None:
            self._note(node, "dies")
            self._stop(node)

    def _leave(self) -> None:
        node = self._somebody()
        if node is None:
            return
        self._note(node, "leaves")
        for link in node.links:
            other = link.other(node)
            if self._random.random() < 0.3:  # its last call is on its way
                self._call(node, other.me.name, 5.0)
            self._at(self._clock.now, other, partial(self._meetings.on_goodbye, other, link))
        if self._store.mode is Mode.UP and self._store.records.get(node.me.name) is node.me:
            del self._store.records[node.me.name]
        self._stop(node)

    def _stop(self, node: Node) -> None:
        node.alive = False
        for other in self._nodes.values():
            for link in other.links:  # this worker may not have kept it yet
                if link.other(other) is node:
                    self._meetings.tell_end(other, link)
        if self._is_open and self._random.random() < 0.8:
            seconds = self._random.choice((0.0, 5.0, 5.0, 60.0)) * self._random.random()
            stays = Node(-1, node.me, node.machine)
            self._at(self._clock.now + seconds, stays, partial(self._come_again, node, stays))

    def _come_again(self, node: Node, process: Node) -> None:
        """Start a new incarnation, which takes a name over as soon as the store answers."""
        if self._store.mode is not Mode.UP:
            if self._clock.now < self._calm:
                later = self._store.changes_at(self._clock.now)
                self._at(later, process, partial(self._come_again, node, process))
            return
        others = list(self._store.records.values())
        id = node.me.id if self._random.random() < 0.7 else 100 + len(self._nodes)
        newcomer = self._new_node(node.me.name, id)
        self._note(newcomer, "joins")
        for other in others:
            if other.name != node.me.name:
                newcomer.machine.add(other)
                if self._random.random() < 0.8:
                    self._call(newcomer, other.name, 5.0)

    # Promises.

    def _check_end(self) -> None:
        living = [node for node in self._nodes.values() if node.alive]
        for one in living:
            self._oracle.check(one)
            for other in living:
                linked = any(link in other.links for link in one.links)
                if one.number < other.number and (
                    linked or self._store_returns or not self._is_open
                ):
                    self._oracle.check_pair(one, other)
        if self._store_returns and self._is_open:
            for node in living:
                self._oracle.check_registered(node, self._store)
                self._asking[node].check_end()


def _finds(node: Node, other: Node) -> bool:
    record = node.machine.known(other.me.name)
    return record is not None and record.begun == other.incarnation
