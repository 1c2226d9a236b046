"""The oracle of connecting: knows the host, judges what the machine says by CON-1 to CON-6.

The invariants are those of `farcall.protocol.connecting`. Violations are:

CON-1 A worker is declared dead that lives and does not refuse us, and its host has not been silent
      for `dead_after` seconds of attempts and `FEWEST_ROUNDS` tries in a row. An attempt counts
      with the time it was given at most, and one that the host has answered ends the silence.
CON-2 An instruction goes beyond the deadline of its caller; a caller is Late before its deadline,
      or has no outcome behind it. (While the dialler stands still no caller has an outcome.)
CON-3 A pause is longer than `LONGEST_PAUSE`; a caller is Late although the worker was in reach, and
      this machine well, for `REACH_SECONDS` before; a caller that waits as long as it takes has no
      link in the end although the worker is in reach.
CON-4 The worker's own address has refused us, and is tried again; or a caller that waits as long as
      it takes has no outcome in the end although the worker refuses us.
CON-5 A host gave no connection for `dead_after` seconds and some rounds, and is tried again; or a
      caller that waits as long as it takes has no outcome in the end although the worker is dead.
CON-6 Two callers dial; or the one with the latest deadline has to wait while none dials, or while
      another one begins to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from farcall.protocol.connecting import (
    FEWEST_ROUNDS,
    LONGEST_PAUSE,
    LONGEST_TRY,
    PROOF_SECONDS,
    Cause,
    Dead,
    DialFailure,
    Instruction,
    Late,
    Pause,
    Talk,
    Try,
    WaitForDialler,
)
from simulator.connecting.world import Outcome, World
from simulator.schedule import Violation

ROUNDING = 1e-6  # seconds
REACH_SECONDS = 45.0  # in which every address is tried: three, of which one says nothing


class Caller:
    """A caller that wants a link.

    Attributes:
        number: for the log.
        deadline: in seconds.
        instruction: the last one.
        ended: whether it has an outcome, or was interrupted.
        turn: how many instructions it has got: events of earlier ones are void.
    """

    def __init__(self, number: int, now: float, deadline: float) -> None:
        self.number = number
        self.began = now
        self.deadline = deadline
        self.instruction: Instruction | None = None
        self.ended = False
        self.turn = 0

    @property
    def dials(self) -> bool:
        """Return whether it is the one that dials."""
        return not self.ended and isinstance(self.instruction, Try | Talk | Pause)

    def __str__(self) -> str:
        return f"caller {self.number}"


class ConnectingOracle:
    """Judge of one schedule."""

    def __init__(self, world: World) -> None:
        self.violations: list[Violation] = []
        self._world = world
        self._first = world.addresses[0].url
        self._last_stall = -math.inf  # of the dialler
        self._last_interruption = -math.inf
        # Silence as it is allowed to count, most generously, and as it has to, most sparingly.
        self._dark_tries = 0
        self._most = 0.0
        self._least = 0.0
        self._least_of_round = 0.0
        self._round_is_doubtful = False

    def stood_still(self, now: float) -> None:
        """Note that the dialler's process was stopped, up to now."""
        self._last_stall = now

    def interrupted(self, now: float) -> None:
        """Note that a caller has given up before its time."""
        self._last_interruption = now

    # Events at the dialler.

    def begins(self, url: str) -> None:
        """Note that an address is tried."""
        if url == self._first:
            self._least_of_round, self._round_is_doubtful = 0.0, False

    def attempted(self, url: str, began: float, given: float, now: float, was: Outcome) -> None:
        """Note that an address has given no connection."""
        if was.failure is DialFailure.OF_THIS_MACHINE:
            self._round_is_doubtful = True
        if url in self._world.strangers:
            return
        if was.reached:
            if was.failure is not DialFailure.TIMED_OUT:  # else it had too little time to tell
                self._end_silence()
            return
        if was.failure in (DialFailure.TIMED_OUT, DialFailure.NO_ANSWER):
            self._dark_tries += 1
            self._most += min(now - began, given)
            is_short = was.failure is DialFailure.TIMED_OUT and given < PROOF_SECONDS
            self._round_is_doubtful |= is_short
            self._least_of_round += min(now - began, given)

    def paused(self, began: float, given: float, now: float) -> None:
        """Note that a pause is over."""
        self._most += min(now - began, given)

    def talked(self, url: str, was: Outcome) -> None:
        """Note that a handshake is over."""
        if url not in self._world.strangers:
            self._end_silence()
        elif was.failure is DialFailure.HANDSHAKE_UNFINISHED:
            self._round_is_doubtful = True
            self._least, self._least_of_round = 0.0, 0.0  # the dialler can't tell who is there

    def _end_silence(self) -> None:
        self._dark_tries, self._most, self._least = 0, 0.0, 0.0
        self._round_is_doubtful = True

    # Instructions of the machine.

    def told(self, caller: Caller, said: Instruction, now: float, others: Iterable[Caller]) -> None:
        """Note that the machine has an instruction for a caller."""
        others = list(others)
        dials = [str(other) for other in others if other.dials]
        match said:
            case WaitForDialler():
                is_next = not any(other.deadline > caller.deadline for other in others)
                holds = bool(dials) or not is_next
                self._expect(holds, "CON-6", f"{caller} waits, and no other dials")
            case Try() | Talk() | Pause():
                self._expect(not dials, "CON-6", f"{caller} dials beside {', '.join(dials)}")
                is_next = caller.dials or all(o.deadline <= caller.deadline for o in others)
                self._expect(is_next, "CON-6", f"{caller} dials before one with more time")
            case Dead():
                self._judge_death(said, now)
            case Late():
                self._judge_lateness(caller, now)
            case _:
                pass
        if isinstance(said, Try | Talk | Pause | WaitForDialler):
            is_in_time = said.until <= caller.deadline + ROUNDING
            self._expect(is_in_time, "CON-2", f"{said} is too late for {caller}")
        if isinstance(said, Pause):
            length = said.until - now
            is_long = length > LONGEST_PAUSE + ROUNDING
            self._expect(not is_long, "CON-3", f"{caller} pauses for {length:.1f} s")

    def answered(self, url: str, failure: DialFailure, said: Instruction) -> None:
        """Note the answer of the machine to the failure of an address."""
        is_own = url == "unix" and failure is DialFailure.REFUSED
        is_final = isinstance(said, Dead)
        self._expect(is_final or not is_own, "CON-4", f"the worker has refused us, and {said}")
        if isinstance(said, Pause | Late):
            self._end_round(said)

    def _end_round(self, said: Instruction) -> None:
        world = self._world
        if not self._round_is_doubtful and self._least_of_round:
            self._least += self._least_of_round
        self._least_of_round = 0.0
        bound = world.dead_after + FEWEST_ROUNDS * LONGEST_TRY * len(world.addresses)
        is_over = world.dead_after > 0 and self._least > bound
        self._expect(not is_over, "CON-5", f"silent for {self._least:.1f} s, and {said}")

    def _judge_death(self, said: Dead, now: float) -> None:
        world = self._world
        if world.is_dead(now) or world.refuses:
            return  # there will be no link
        if said.cause is Cause.SILENT:
            is_proven = (
                world.dead_after > 0
                and self._most >= world.dead_after - ROUNDING
                and self._dark_tries >= FEWEST_ROUNDS
            )
            seen = f"{self._dark_tries} tries, {self._most:.2f} s"
            self._expect(is_proven, "CON-1", f"dead by silence after {seen}")
        else:
            self._report("CON-1", f"{said}, and it lives")

    def _judge_lateness(self, caller: Caller, now: float) -> None:
        early = caller.deadline - now
        self._expect(early <= ROUNDING, "CON-2", f"{caller} is late {early:.3f} s too soon")
        since = max(caller.deadline, caller.began + REACH_SECONDS) - REACH_SECONDS
        if caller.deadline - caller.began < REACH_SECONDS or self._world.refuses:
            return
        well = max(self._last_stall, self._last_interruption) < since
        in_reach = well and self._world.was_in_reach(since, now)
        self._expect(not in_reach, "CON-3", f"{caller} is late, and the worker was in reach")

    # All along, and in the end.

    def check(self, callers: Iterable[Caller], now: float) -> None:
        """Check the callers after each event."""
        for caller in callers:
            is_over = now > max(caller.deadline, self._last_stall) + ROUNDING
            if not caller.ended and is_over:
                self._report("CON-2", f"{caller} is over its deadline by {now - caller.deadline} s")

    def check_end(self, callers: Iterable[Caller], now: float) -> None:
        """Check the callers after the host has been left alone for long."""
        world = self._world
        in_reach = world.was_in_reach(now - REACH_SECONDS, now)
        for caller in callers:
            if caller.ended or caller.deadline < math.inf or self._may_be_fooled():
                continue
            if world.is_dead(now):
                self._report("CON-5", f"{caller} waits for a worker that is dead")
            elif in_reach and world.refuses:
                self._report("CON-4", f"{caller} waits for a worker that refuses us")
            elif in_reach:
                self._report("CON-3", f"{caller} waits for a worker that is in reach")
            elif world.dead_after and world.is_dark(now) and self._last_stall < 0:
                self._report("CON-5", f"{caller} waits for a host that is dark")

    def _may_be_fooled(self) -> bool:
        """Return whether a stranger takes connections and says nothing: it may be a busy worker."""
        return any(stranger == "says nothing" for stranger in self._world.strangers.values())

    def _expect(self, holds: bool, invariant: str, text: str) -> None:
        if not holds:
            self._report(invariant, text)

    def _report(self, invariant: str, text: str) -> None:
        self.violations.append(Violation(invariant, text))
