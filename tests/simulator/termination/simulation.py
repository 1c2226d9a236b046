"""One schedule of leaving: workers call each other, become ready, stand still and die, at moments
drawn from a seed.

The machines are `farcall.protocol.termination`'s, as `runtime/membership/shutdown.py` runs
them. The judge checks:

DEP-1 At each dismissal, but by a worker that was given up: every worker that counts is ready, and
      serves or waits for no call on behalf of workers that all count. A worker counts unless it is
      dead, or was given up.
DEP-2 In the end every worker has left, but for the dead and those that stand still forever.
DEP-3 A worker is given up that has answered within the bound, or was not asked for as long.
DEP-4 A worker is not given up although it has answered no question for the bound and two more.
DEP-5 A worker answers with a smaller number than before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import islice

from farcall.protocol.termination import STANDSTILL, Messages
from farcall.wire.messages import Dismiss, Drain, Drained
from simulator.agenda import Agenda
from simulator.schedule import Result, Schedule, Script
from simulator.termination.planted import TerminationBug, detector_of, silence_of
from simulator.termination.world import Answer, Call, Loss, Member

MAX_EVENTS = 6000
LONGEST_CHAIN = 8
USERS = 90.0  # seconds in which users call, and call shutdown
ROUNDING = 1e-6  # seconds


def simulate_termination(
    seed: int, *, bug: TerminationBug | None = None, script: Script | None = None
) -> Result:
    """Run one schedule.

    Args:
        seed: equal arguments give equal results.
        bug: a mistake to plant in the machine, to see it found.
        script: see `Schedule`. The inputs are calls, deaths and standstills.
    """
    return _TerminationSchedule(seed, bug, script).run()


class _TerminationSchedule(Schedule):
    def __init__(self, seed: int, bug: TerminationBug | None, script: Script | None) -> None:
        super().__init__(seed, script)
        random = self._random
        self._slowest = random.choice((0.01, 1.0, 5.0))  # seconds that a message takes
        self._world: Agenda[Member] = Agenda(self._clock, random, self._slowest)
        self._calls = 0
        self._bound = random.choice((0.0, 1.0, 5.0, 30.0, 30.0))
        self._longest = random.choice((0.01, 1.0, 30.0))  # seconds that a function takes
        self._nests = random.choice((0.0, 0.3, 0.6, 0.8))
        size = random.choice((1, 2, 3, 3, 4, 6))
        numbers = list(enumerate(random.sample(range(100), size)))
        detector, silence = detector_of(bug), silence_of(bug)
        self._members = {
            number: Member(number, detector(number, numbers), silence(self._bound))
            for _, number in numbers
        }
        self._draw(random.choice((0.0, 0.0, 0.1, 0.5)), random.choice((0.0, 0.0, 0.3, 0.8)))

    def _draw(self, deaths: float, standstills: float) -> None:
        """Draw what users do, and what befalls the workers."""
        random = self._random
        span = random.choice((0.1, 3.0, 10.0, USERS))
        for member in self._members.values():
            leaves = random.uniform(0.0, span)
            self._world.at(leaves, member, partial(self._leave, member))
            for _ in range(random.choice((0, 1, 3, 10))):
                self._input(random.uniform(0.0, span), member, self._call_anybody)
            if random.random() < deaths:
                soon = leaves + random.uniform(0.0, 3 * self._slowest)
                moment = random.choice((soon, random.uniform(0.0, 1.5 * span)))
                self._input(moment, member, self._die)
            while random.random() < standstills:
                moment = random.uniform(0.0, 1.5 * span)
                self._input(moment, member, self._stand_still)
                standstills *= 0.7

    def _input(self, moment: float, member: Member, act: Callable[[Member], None]) -> None:
        if self._happens():
            self._world.at(
                moment, member, partial(self._perform, self._inputs, partial(act, member))
            )

    def _play(self) -> None:
        self._note("the bound is", self._bound, "s;", *self._members)
        for member, act in islice(self._world, MAX_EVENTS):
            if member.takes_part:
                act()
            if self._violations:
                return
        if not self._world:
            self._check_end()

    # Work of workers, as `ShutdownCoordinator` does it.

    def _post(self, sender: Member, messages: Messages) -> None:
        for to, message in messages:
            if type(message) is Drained:
                if message.epoch < sender.told:
                    self._violate("DEP-5", f"{sender} answers {message.epoch} after {sender.told}")
                sender.told = message.epoch
            self._send(sender, to, message)

    def _send(self, sender: Member, to: int, item: object) -> None:
        receiver, now = self._members[to], self._clock.now
        act = partial(self._deliver, sender, receiver, item, now)
        self._world.send(sender.number, receiver, act)

    def _begun(self, member: Member) -> None:
        if member.leaving:
            member.epoch += 1

    def _ended(self, member: Member) -> None:
        if not member.active and member.leaving and member.detector.asked:
            self._step(member, list)

    def _step(self, member: Member, event: Callable[[], Messages]) -> None:
        member.detector.busy()
        messages = event()
        if not member.active:
            messages += member.detector.idle(member.epoch)
        self._post(member, messages)
        self._look_for_end(member)

    def _look_for_end(self, member: Member) -> None:
        if not member.detector.dismissed:
            return
        self._note(member, "leaves")
        self._check_dismissal(member)
        for other in self._members:
            self._send(member, other, Loss())

    def _call_anybody(self, member: Member, chain: tuple[int, ...] = ()) -> None:
        if member.leaving and not chain:
            return  # its user has nothing more to do
        to = self._random.choice(list(self._members))
        if to in member.gone:
            return
        self._calls += 1
        chain = (*chain, member.number)
        member.own[self._calls] = to, chain
        self._begun(member)
        self._note(member, "calls", self._members[to], "number", self._calls)
        self._send(member, to, Call(self._calls, chain))

    def _serve(self, member: Member, call: Call) -> None:
        member.serving.append(call)
        self._begun(member)
        now, random = self._clock.now, self._random
        for _ in range(2):
            if random.random() > self._nests or len(call.chain) >= LONGEST_CHAIN:
                break
            moment = now + random.uniform(0.0, self._longest)
            self._input(moment, member, partial(self._nest, call=call))
        moment = now + random.uniform(0.0, self._longest)
        self._world.at(moment, member, partial(self._finish, member, call))

    def _nest(self, member: Member, call: Call) -> None:
        if call in member.serving:
            self._call_anybody(member, call.chain)

    def _finish(self, member: Member, call: Call) -> None:
        member.serving.remove(call)
        if call.chain[-1] not in member.gone:
            self._send(member, call.chain[-1], Answer(call.number))
        self._ended(member)

    def _leave(self, member: Member) -> None:
        self._note(member, "is ready to leave")
        member.leaving = True
        self._step(member, member.detector.ready)
        self._ask_later(member)

    def _deliver(self, by: Member, member: Member, item: object, sent: float) -> None:
        sender = by.number
        is_cut = sent >= by.cut.get(member.number, math.inf) and not isinstance(item, Loss)
        if sender in member.gone or is_cut:
            return
        self._note(member, "gets", item, "from", by)
        detector = member.detector
        match item:
            case Call():
                self._serve(member, item)
            case Answer(number):
                if member.own.pop(number, None):
                    self._ended(member)
            case Drain():
                self._step(member, partial(detector.on_drain, sender, item))
            case Drained():
                self._step(member, partial(detector.on_drained, sender, item))
            case Dismiss():
                detector.on_dismiss(sender)
                self._look_for_end(member)
            case Loss():
                self._on_peer_lost(member, sender)

    def _on_peer_lost(self, member: Member, gone: int) -> None:
        member.gone.add(gone)
        ended = [number for number, (callee, _) in member.own.items() if callee == gone]
        for number in ended:
            del member.own[number]
        if ended:
            self._ended(member)
        if member.takes_part:
            self._step(member, partial(member.detector.on_peer_lost, gone))

    # Questions.

    def _ask_later(self, member: Member) -> None:
        if self._bound:
            moment = self._clock.now + member.silence.question
            self._world.at(moment, member, partial(self._ask_all, member))

    def _ask_all(self, member: Member) -> None:
        awaited = {*member.detector.missing, *(callee for callee, _ in member.own.values())}
        for to in sorted(awaited - {member.number} - member.asking - member.gone):
            self._ask(member, self._members[to])
        self._ask_later(member)

    def _ask(self, member: Member, other: Member) -> None:
        now, question = self._clock.now, member.silence.question
        member.asking.add(other.number)
        member.heard.setdefault(other.number, now)
        answer = other.answers_at(now)
        heard = answer <= now + question
        ends = answer if heard else now + (question if other.takes_part else 0.0)
        self._world.at(ends, member, partial(self._end_question, member, other, now, heard=heard))

    def _end_question(self, member: Member, other: Member, began: float, *, heard: bool) -> None:
        number, now = other.number, self._clock.now
        member.asking.discard(number)
        if heard:
            member.heard[number], member.asked[number] = now, 0.0
            member.silence.answered(number)
            return
        seconds = now - began
        if seconds <= STANDSTILL * member.silence.question:
            member.asked[number] = member.asked.get(number, 0.0) + seconds
        gives_up = member.silence.unanswered(number, seconds)
        if number in member.gone:
            return
        asked = member.asked.get(number, 0.0)
        if gives_up and asked < self._bound - ROUNDING:
            self._violate("DEP-3", f"{member} gives up {other} after {asked:.1f} s of questions")
        if not gives_up and asked > self._bound + 2 * member.silence.question:
            self._violate("DEP-4", f"{member} waits for {other} after {asked:.1f} s of questions")
        if gives_up:
            self._note(member, "gives up", other)
            other.given_up = True
            self._send(member, number, Loss())
            self._on_peer_lost(member, number)

    # Events.

    def _die(self, member: Member) -> None:
        self._note(member, "dies")
        member.alive = False
        for other in self._members:
            member.cut[other] = self._clock.now - self._random.choice((0.0, 0.1, 5.0))
            self._send(member, other, Loss())

    def _stand_still(self, member: Member) -> None:
        forever = self._bound and self._random.random() < 0.2
        seconds = self._random.choice((0.1, 1.0, 10.0, 60.0)) * self._random.random()
        self._note(member, "stands still", "forever" if forever else f"for {seconds:.2f} s")
        member.stands_until = math.inf if forever else self._clock.now + seconds

    # Promises.

    def _check_dismissal(self, dismissed: Member) -> None:
        leader = self._members[dismissed.detector.leader]
        if not dismissed.counts or leader.given_up:
            return  # the group has split, see DEP-1
        for member in self._members.values():
            if not member.counts or member.number in dismissed.gone:
                continue
            if not member.leaving:
                self._violate("DEP-1", f"{dismissed} leaves, and {member} is not ready")
            chains = [call.chain for call in member.serving] + [c for _, c in member.own.values()]
            if any(all(self._members[n].counts for n in chain) for chain in chains):
                self._violate("DEP-1", f"{dismissed} leaves, and {member} is busy")

    def _check_end(self) -> None:
        for member in self._members.values():
            if member.takes_part and member.stands_until < math.inf:
                self._violate("DEP-2", f"{member} waits for {member.detector.missing}")
