"""One schedule: a random program on simulated workers over a faulty network, judged all along.

A schedule is drawn from one `random.Random(seed)`: the number of workers, the faults, the program
and the order of everything. It has two parts. First the workers act: they call `remote()`, call
each other with references, answer with references, copy and drop them, give up on calls, die, come
back, are cut off. Then everything calms down: links are healed, losses noticed, functions end,
calls without an answer time out, and messages are repeated until no worker waits for anything. The
oracle checks after every event, and once more at the end.
"""

from __future__ import annotations

from random import Random

from farcall.ids import meeting_of, nth_incarnation, original
from farcall.protocol.instructions import Answer, Follow, Send
from farcall.testing.clock import ManualClock
from farcall.testing.network import Faults, Network
from farcall.wire.messages import Message, Request
from simulator.oracle import Oracle
from simulator.planted import PlantedBug, plant
from simulator.program import Program
from simulator.schedule import Result, Schedule, Script
from simulator.sim_records import Handle
from simulator.sim_worker import SimWorker

Sent = tuple[Message, int, int]  # with its call id, and in which meeting of the two it was sent

MAX_ROUNDS = 12  # of ticks, in the end, until the machines must have settled


def simulate(
    seed: int,
    faults: Faults | None = None,
    *,
    bug: PlantedBug | None = None,
    script: Script | None = None,
) -> Result:
    """Run one schedule of the reference and call protocols.

    Args:
        seed: equal arguments give equal results.
        faults: what goes wrong; drawn from the seed when None.
        bug: a mistake to plant in the machines, to see it found.
        script: see `Schedule`. The inputs are the steps of the first part.
    """
    return _CallSchedule(seed, faults, bug, script).run()


class _Links:
    """The links between the workers: two for each pair, one dialled by each, as agents have them.

    Requests and what follows them go by the caller's link, and the answers come back on it. The
    rest goes by the link of the other once that has called us, else by our own. So a RELEASE may
    overtake a request, or a REGISTER an answer, over links that lose nothing and keep the order.
    """

    def __init__(self, clock: ManualClock, random: Random, faults: Faults) -> None:
        self._draw = random.random
        # By whether the receiver has dialled the link.
        self._networks: tuple[Network[Sent], ...] = tuple(
            Network(clock, random, faults) for _ in range(2)
        )
        self._called: set[tuple[int, int, int]] = set()  # caller, callee, meeting

    def send(self, source: int, what: Send | Follow | Answer) -> None:
        target, meeting = original(what.to), meeting_of(what.to)
        match what:
            case Follow():
                is_receivers = False
            case Answer():
                is_receivers = True
            case Send():
                is_receivers = (target, source, meeting) in self._called
        self._networks[is_receivers].send(source, target, (what.message, what.call_id, meeting))

    def received(self, source: int, target: int, message: Message, meeting: int) -> None:
        """Take down that the target got this message."""
        if isinstance(message, Request):
            self._called.add((source, target, meeting))

    def deliver(self) -> tuple[int, int, Sent] | None:
        """Return the next arrival on one link or the other, or None if there is no more."""
        first, second = self._networks
        if self._draw() * len(self) >= len(first):
            first, second = second, first
        return first.deliver() or second.deliver()

    def cut(self, one: int, other: int) -> None:
        for network in self._networks:
            network.cut(one, other)

    def heal(self, one: int, other: int) -> None:
        for network in self._networks:
            network.heal(one, other)

    def calm(self) -> None:
        for network in self._networks:
            network.calm()

    def has_for(self, source: int, target: int) -> bool:
        return any(network.has_for(source, target) for network in self._networks)

    def __len__(self) -> int:
        return sum(len(network) for network in self._networks)


class _CallSchedule(Schedule):
    def __init__(
        self, seed: int, faults: Faults | None, bug: PlantedBug | None, script: Script | None
    ) -> None:
        super().__init__(seed, script)
        random = self._random
        self._draw = random.random
        drawn, self._steps = Faults.drawn(random), random.randrange(15, 90)
        self._faults = faults or drawn
        self._machines, self._worker_class = plant(bug)
        self._network = _Links(self._clock, random, self._faults)
        self._oracle = Oracle()
        self._violations = self._oracle.violations
        self._incarnations = 0
        self._workers: dict[int, SimWorker] = {}
        self._names: dict[int, str] = {}
        self._program = Program(random, self._workers, self._names, self._note)
        self._dead: list[str] = []
        self._notices: list[tuple[int, int]] = []  # (who, whom): will declare it lost
        self._cuts: list[tuple[int, int, bool]] = []
        self._delivery_rate = 0.3 + 0.5 * random.random()
        for index in range(random.choice((2, 3, 3, 4, 5))):
            self._start(f"w{index}")

    def _play(self) -> None:
        for _ in range(self._steps):
            if self._happens():
                self._perform(self._inputs, self._step)
                self._oracle.check()
            if self._violations:
                return
        self._perform(0, self._settle)

    # Steps.

    def _step(self) -> None:
        if self._notices and self._draw() < 0.3:
            self._notice()
            return
        if self._draw() < self._delivery_rate and self._deliver():
            return
        faults, chance = self._faults, self._draw()
        if chance < faults.crash:
            self._crash()
        elif chance < faults.crash + faults.partition:
            self._cut()
        elif chance < faults.crash + faults.partition + faults.meeting:
            self._part_or_meet()
        elif self._cuts and self._draw() < 0.3:
            self._heal()
        elif self._dead and self._draw() < 0.1:
            self._discard()
        elif self._dead and self._draw() < faults.restart:
            self._start(self._dead.pop())
        else:
            self._program.act(self._program.pick(list(self._workers.values())))

    def _deliver(self) -> bool:
        arrival = self._network.deliver()
        if arrival is None:
            return False
        source, target, (message, call_id, meeting) = arrival
        worker = self._workers.get(target)
        sender = nth_incarnation(source, meeting)
        self._note(self._name(sender), "->", self._name(target), message, "call", call_id)
        if worker is not None:
            if worker.meeting_with(source) < meeting:
                self._begin_anew(worker, source, meeting)
            self._network.received(source, target, message, meeting)
            # Agents drop messages of a meeting that their worker never was in: DIR-3.
            if meeting >= worker.meeting_with(source) or worker.machine.is_lost(sender):
                worker.receive(sender, message, call_id)
        return True

    def _part_or_meet(self) -> None:
        """Let a worker get a link to one that it has lost; the messages of the link tell that one.

        If there is no such pair, a worker takes another for dead that lives.
        """
        parted = [
            (one, other)
            for one, worker in self._workers.items()
            for other in self._workers
            if worker.machine.is_lost(worker.now(other))
        ]
        if not parted:
            held = [
                (one, owner)
                for one, worker in self._workers.items()
                for owner in {original(handle.owner) for handle in worker.handles}
                if owner != one and owner in self._workers
            ]
            if held and self._draw() < 0.7:
                self._will_notice(*self._program.pick(held))
            elif len(self._workers) > 1:
                self._will_notice(*self._random.sample(sorted(self._workers), 2))
            return
        one, other = self._program.pick(parted)
        worker, peer = self._workers[one], self._workers[other]
        they_have_parted = peer.machine.is_lost(peer.now(one))
        meeting = max(worker.meeting_with(other) + 1, peer.meeting_with(one) + they_have_parted)
        self._begin_anew(worker, other, meeting)
        self._will_notice(other, one)

    def _begin_anew(self, worker: SimWorker, other: int, meeting: int) -> None:
        """Let a worker learn that another one is there, which may have lost it."""
        me, before = worker.incarnation, worker.now(other)
        if not worker.machine.is_lost(before):
            self._note(worker.label, "declares lost", self._name(before))
            worker.on_peer_lost(before)
        self._note(worker.label, "meets again", self._name(nth_incarnation(other, meeting)))
        worker.meet_again(other, meeting)
        if self._draw() < 0.5:
            self._program.remind(worker, other)
        if other not in self._workers or self._workers[other].has_parted(me, meeting):
            self._will_notice(me, other)

    def _start(self, name: str) -> None:
        self._incarnations += 1
        worker = self._worker_class(
            name,
            self._incarnations,
            self._machines,
            self._network.send,
            self._oracle,
            self._random,
            self._faults.is_fifo,
        )
        self._workers[worker.incarnation] = worker
        self._names[worker.incarnation] = worker.label
        self._note(worker.label, "starts")
        for incarnation in self._names:
            if incarnation not in self._workers:
                # It will find out when it tries to reach it.
                self._will_notice(worker.incarnation, incarnation)

    def _crash(self) -> None:
        if len(self._workers) < 2:
            return
        # It hurts most in the middle of something.
        busy = self._oracle.senders() if self._draw() < 0.5 else []
        victim = self._workers[self._program.pick(busy or list(self._workers))]
        self._note(victim.label, "dies")
        del self._workers[victim.incarnation]
        self._oracle.died(victim.incarnation)
        self._notices = [n for n in self._notices if n[0] != victim.incarnation]
        for worker in self._workers.values():
            self._will_notice(worker.incarnation, victim.incarnation)
        self._dead.append(victim.name)

    def _will_notice(self, who: int, whom: int) -> None:
        worker = self._workers.get(who)
        if worker is None or (who, whom) in self._notices:
            return
        if worker.machine.is_lost(worker.now(whom)):
            return
        self._notices.append((who, whom))

    def _notice(self) -> None:
        who, whom = self._notices.pop(int(self._draw() * len(self._notices)))
        worker = self._workers[who]
        peer = worker.now(whom)
        self._note(self._name(who), "declares lost", self._name(peer))
        if self._draw() < 0.2 and not worker.machine.is_lost(peer):
            self._program.call_while_lost(worker, peer)
        worker.on_peer_lost(peer)
        if whom in self._workers and not self._workers[whom].has_parted(who, meeting_of(peer)):
            self._will_notice(whom, who)  # its links have ended

    def _discard(self) -> None:
        """Let one worker forget the lost dead of which no message will come any more."""
        worker = self._program.pick(list(self._workers.values()))
        for peer in self._names:
            is_dead = peer not in self._workers and worker.machine.is_lost(worker.now(peer))
            if is_dead and not self._network.has_for(peer, worker.incarnation):
                self._note(worker.label, "forgets", self._name(peer))
                worker.discard_peer(peer)

    def _cut(self) -> None:
        if len(self._workers) < 2:
            return
        one, other = self._random.sample(sorted(self._workers), 2)
        lasting = self._draw() < self._faults.lasting
        self._note(self._name(one), "and", self._name(other), "are cut off, lasting:", lasting)
        self._network.cut(one, other)
        self._cuts.append((one, other, lasting))

    def _heal(self) -> None:
        one, other, lasting = self._cuts.pop(int(self._draw() * len(self._cuts)))
        self._note(self._name(one), "and", self._name(other), "are healed, for good:", not lasting)
        if lasting:
            self._will_notice(one, other)
            self._will_notice(other, one)
        self._network.heal(one, other)

    # The end.

    def _settle(self) -> None:
        self._note("everything calms down")
        self._network.calm()
        for one, other, lasting in self._cuts:
            if lasting:
                self._will_notice(one, other)
                self._will_notice(other, one)
        keep = self._program.pick((0.0, 0.5, 1.0))
        kept: dict[int, set[Handle]] = {}
        for _ in range(MAX_ROUNDS):
            self._drain()
            for worker in self._workers.values():
                self._let_go(worker, keep, kept.setdefault(worker.incarnation, set()))
            self._drain()
            if self._is_quiet():
                break
            for worker in self._workers.values():
                while self._program.abandon(worker):
                    pass
                self._program.tick(worker)
            self._oracle.check()
        for worker in self._workers.values():
            for peer in self._names:
                if peer not in self._workers:
                    worker.discard_peer(peer)
        self._oracle.check_end(set(self._names) - set(self._workers))

    def _drain(self) -> None:
        """Drain the world until nothing is on its way, no loss unnoticed, and no function runs."""
        busy = True
        while busy and not self._oracle.violations:
            busy = bool(self._notices)
            if self._notices and (self._draw() < 0.3 or not len(self._network)):
                self._notice()
            elif self._deliver():
                busy = True
            else:
                for worker in self._workers.values():
                    busy |= (
                        self._program.open_box(worker)
                        or self._program.rebuild(worker)
                        or self._program.finish(worker)
                    )
            self._oracle.check()

    def _let_go(self, worker: SimWorker, keep: float, kept: set[Handle]) -> None:
        for handle in list(worker.handles):
            if handle in kept:
                continue
            if self._draw() < keep:
                kept.add(handle)
                continue
            self._note(worker.label, "discards all", handle)
            while handle in worker.handles:
                worker.discard(handle)

    def _is_quiet(self) -> bool:
        return not len(self._network) and all(
            worker.refs.is_settled
            and not worker.boxes
            and not any(len(o) or list(o.abandoned()) for o in worker.outgoing.values())
            for worker in self._workers.values()
        )

    # Helpers.

    def _name(self, incarnation: int) -> str:
        return self._program.name(incarnation)
