"""Decide where and when to dial one incarnation of a worker, and when it counts as dead.

Several callers may want a link to the same worker, each up to a deadline of its own. One caller at
a time is the *dialler*, which carries out the machine's instructions; the others wait. A *round*
tries every address of the worker once, in order.

    state                event                              next        instruction
    -------------------  ---------------------------------  ----------  -------------------------
    -                    the worker has addresses           IDLE        none
    -                    the worker has none                DEAD        none
    IDLE                 begin, woke                        CONNECTING  Try the first address
    CONNECTING           connected                          TALKING     Talk
    CONNECTING, TALKING  failed, and addresses are left     CONNECTING  Try the next address
    CONNECTING, TALKING  failed: the worker has refused us  DEAD        Dead REFUSED
    CONNECTING, TALKING  failed, last: ABSENT everywhere    DEAD        Dead ABSENT
    CONNECTING, TALKING  failed, last: silent long enough   DEAD        Dead SILENT
    CONNECTING, TALKING  failed, last: anything else        PAUSED      Pause
    CONNECTING, TALKING  failed, beyond the deadline        IDLE        Late
    TALKING              linked                             LINKED      none; others are Linked
    PAUSED               woke                               CONNECTING  Try the first address
    PAUSED               woke, beyond the deadline          IDLE        Late
    CONNECTING, TALKING  left (the dialler ends)            IDLE        none; a waiting caller woke
    PAUSED               left (the dialler ends)            IDLE        none; a waiting caller woke
    any                  begin, woke by another caller      same        WaitForDialler
    LINKED               begin, woke                        LINKED      Linked
    DEAD                 begin, woke                        DEAD        Dead, as before

Callers whose deadline has passed are Late in every state but LINKED and DEAD.

Each failure of an attempt means:

    failure               the worker is not there  counts as silence  ends the silence
    --------------------  -----------------------  -----------------  ----------------
    ABSENT                yes                      no                 no
    NO_ANSWER             no                       yes                no
    TIMED_OUT             no                       if long enough     no
    OF_THIS_MACHINE       no                       no, see CON-5      no
    HANDSHAKE_UNFINISHED  no                       no                 yes
    REFUSED               see CON-4                no                 no

An attempt is long enough if it had `PROOF_SECONDS`, or `PROOF_SHARE` of `dead_after` if that is
shorter. (`dead_after` is the option `dead_host_timeout`.)

Invariants:

CON-1 (only proof is death) A worker is declared dead only if every address said in one round that
      it is not there, or by CON-4, or by silence. Silence takes `dead_after` seconds of attempts
      and `FEWEST_ROUNDS` rounds in a row in which no address gave a connection to the worker. The
      time between calls does not count. Neither does the part of an attempt or a pause that goes
      beyond its limit, since this process may have been stopped then.
CON-2 (deadlines hold) No instruction goes beyond the deadline of its caller, and a caller that has
      neither a link nor a dead worker at its deadline is Late then, and not before.
CON-3 (persistence) Until the deadline the worker is dialled again, at most `LONGEST_PAUSE` seconds
      after the round before, however many rounds have failed.
CON-4 (refusal) A refusal at a worker's own address is final. A refusal at another address may come
      from another host's worker, so it is final only if no address of the round may still lead to
      the worker.
CON-5 (dark hosts end) A host that has given no connection for `dead_after` seconds of attempts is
      declared dead at the end of the round. Rounds with failures of this machine's own neither
      count as silence nor end a silence. The same holds for rounds whose callers had no time for a
      connection.
CON-6 (one dialler) One caller dials at a time. When the dialler ends, the caller with the latest
      deadline takes its place, so a stream of callers with little time keeps no other caller from
      dialling.

The machine is pure, and not thread-safe: its owner holds a lock around each event. Times are
seconds on any one monotonic clock; callers are compared by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two rounds
FEWEST_ROUNDS = 3
SHORTEST_TRY, LONGEST_TRY = 1.0, 7.5  # seconds for a connection, where the deadline leaves as much
TRIES = 4  # for which `dead_after` has to suffice, if they aren't shorter than that
# The time of a slow connection. One that had less time and was not made proves nothing. If
# `dead_after` is short, its user says that connections are quick.
PROOF_SECONDS, PROOF_SHARE = 1.0, 1 / 20
# For a handshake, where another address may be the right one: more than the other side gives it.
HANDSHAKE_SECONDS = 20.0


class DialFailure(Enum):
    """The reason why an address gave no link."""

    ABSENT = auto()  # the worker is not there: the host says so, or the process that answers there
    NO_ANSWER = auto()  # the network or a name server says that it can't be reached now
    TIMED_OUT = auto()  # nothing came back
    OF_THIS_MACHINE = auto()  # such as too many open files
    HANDSHAKE_UNFINISHED = auto()  # it ended, or ran out of time, after the connection was made
    REFUSED = auto()  # what answers may be the worker, and wants no link


class Cause(Enum):
    """The reason why a worker counts as dead."""

    ABSENT = auto()
    REFUSED = auto()
    SILENT = auto()


class Address(NamedTuple):
    """A place where a worker may be.

    Attributes:
        url: names the address.
        is_exclusive: only the worker can be there, and no other address leads to it sooner.
    """

    url: str
    is_exclusive: bool = False


class Try(NamedTuple):
    """Connect to this address, and say `connected` or `failed`."""

    url: str
    until: float


class Talk(NamedTuple):
    """Shake hands over the connection, and say `linked` or `failed`."""

    until: float


class Pause(NamedTuple):
    """Say `woke` then."""

    until: float


class WaitForDialler(NamedTuple):
    """Another caller dials: say `woke` when that one has ended, or then."""

    until: float


class Linked(NamedTuple):
    """Another caller has made the link."""


class Late(NamedTuple):
    """The deadline has passed; the worker may be alive."""


class Dead(NamedTuple):
    """The worker is dead, or refuses us.

    Attributes:
        cause: why.
        seconds: for how long the host was silent.
    """

    cause: Cause
    seconds: float = 0.0


Instruction = Try | Talk | Pause | WaitForDialler | Linked | Late | Dead


class State(Enum):
    """See the table."""

    IDLE = auto()
    CONNECTING = auto()
    TALKING = auto()
    PAUSED = auto()
    LINKED = auto()
    DEAD = auto()


class Connecting:
    """The machine of one worker.

    Args:
        addresses: of the worker, best first.
        dead_after: seconds of silence after which its host counts as dead; 0: never.

    Attributes:
        state: see the table.
        silent: seconds of silence up to now.
    """

    def __init__(self, addresses: Sequence[Address], dead_after: float) -> None:
        self.state = State.IDLE if addresses else State.DEAD
        self.silent = 0.0
        self._addresses = addresses
        self._dead_after = dead_after
        share = dead_after / (TRIES * max(1, len(addresses)))
        self._longest_try = min(LONGEST_TRY, max(SHORTEST_TRY, share)) if share else LONGEST_TRY
        self._proof = min(PROOF_SECONDS, dead_after * PROOF_SHARE)
        self._rounds = 0  # silent ones, in a row
        self._dead = None if addresses else Dead(Cause.ABSENT)
        self._waiting: dict[object, float] = {}  # callers, with their deadlines
        # Of the caller that dials.
        self._dialler: object = None
        self._deadline = 0.0
        self._pause = FIRST_PAUSE
        # Of what it does now.
        self._began = 0.0
        self._until = 0.0
        # Of the round.
        self._index = 0
        self._failures: list[DialFailure] = []
        self._round_silent = 0.0
        self._counts = False  # the last round counted as silence, and so does the pause after it

    @property
    def is_idle(self) -> bool:
        """Return whether no caller dials."""
        return self._dialler is None

    # Events.

    def begin(self, caller: object, now: float, deadline: float) -> Instruction:
        """Hear that a caller wants a link, up to its deadline."""
        if self._dead is not None:
            return self._dead
        if self.state is State.LINKED:
            return Linked()
        if now >= deadline:
            return Late()
        if self._dialler is not None or deadline < max(self._waiting.values(), default=0.0):
            self._waiting[caller] = deadline
            return WaitForDialler(deadline)
        self._waiting.pop(caller, None)
        self._dialler = caller
        self._deadline = deadline
        self._pause = FIRST_PAUSE
        return self._begin_round(now)

    def woke(self, caller: object, now: float, deadline: float) -> Instruction:
        """Hear that a `Pause` or `WaitForDialler` is over, or that the dialler has ended."""
        if self._dialler is not caller:
            return self.begin(caller, now, deadline)
        if self._counts:
            self.silent += min(now, self._until) - self._began
        if now >= self._deadline:
            return self._late()
        return self._begin_round(now)

    def connected(self, now: float) -> Talk:
        """Hear that there is a connection to the address."""
        self.state = State.TALKING
        address = self._addresses[self._index]
        if not address.is_exclusive and len(self._addresses) > 1:
            until = min(self._deadline, now + min(HANDSHAKE_SECONDS, self._share(now)))
        else:
            until = self._deadline
        return Talk(until)

    def failed(self, now: float, failure: DialFailure, jitter: float) -> Instruction:
        """Hear that the address has given no link.

        Args:
            jitter: at random between 0 and 1, so that workers don't dial in step.
        """
        self._failures.append(failure)
        self._note_silence(now, failure)
        if self._addresses[self._index].is_exclusive:
            if failure is DialFailure.REFUSED:
                return self._die(Cause.REFUSED)
            if failure is DialFailure.HANDSHAKE_UNFINISHED:
                return self._end_round(now, jitter)
        if self._left == 1:
            return self._end_round(now, jitter)
        if now >= self._deadline:
            return self._late()
        self._index += 1
        return self._try(now)

    def linked(self) -> None:
        """Hear that the dialler has a link."""
        self.state = State.LINKED
        self._dialler = None

    def left(self, caller: object) -> None:
        """End a caller, in whatever way. Those that wait have to say `woke` then."""
        self._waiting.pop(caller, None)
        if self._dialler is caller:
            self._dialler = None
            if self.state not in (State.LINKED, State.DEAD):
                self.state = State.IDLE

    # Rounds.

    @property
    def _left(self) -> int:
        """Return how many addresses of the round are left, this one included."""
        return len(self._addresses) - self._index

    def _share(self, now: float) -> float:
        """Return the seconds that the address has if the others shall have as much."""
        return max(0.0, self._deadline - now) / self._left

    def _begin_round(self, now: float) -> Try:
        self._index = 0
        self._failures = []
        self._round_silent = 0.0
        self._counts = False
        return self._try(now)

    def _try(self, now: float) -> Try:
        self.state = State.CONNECTING
        self._began = now
        self._until = now + min(self._longest_try, self._share(now))
        return Try(self._addresses[self._index].url, self._until)

    def _end_round(self, now: float, jitter: float) -> Instruction:
        self._settle_silence()
        failures = set(self._failures)
        if failures == {DialFailure.ABSENT}:
            return self._die(Cause.ABSENT)
        if failures <= {DialFailure.ABSENT, DialFailure.REFUSED}:
            return self._die(Cause.REFUSED)
        if 0 < self._dead_after <= self.silent and self._rounds >= FEWEST_ROUNDS:
            return self._die(Cause.SILENT)
        if now >= self._deadline:
            return self._late()
        return self._wait(now, jitter)

    def _wait(self, now: float, jitter: float) -> Pause:
        self.state = State.PAUSED
        self._began = now
        self._until = min(self._deadline, now + self._pause * (1 + jitter) / 2)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return Pause(self._until)

    # Ends.

    def _late(self) -> Late:
        self.state = State.IDLE
        self._dialler = None
        return Late()

    def _die(self, cause: Cause) -> Dead:
        self.state = State.DEAD
        self._dialler = None
        self._dead = Dead(cause, self.silent)
        return self._dead

    # Silence.

    def _note_silence(self, now: float, failure: DialFailure) -> None:
        """Add what the attempt at this address says."""
        given = self._until - self._began
        if failure is DialFailure.NO_ANSWER or (
            failure is DialFailure.TIMED_OUT and given >= self._proof
        ):
            self._round_silent += min(now - self._began, given)
        elif failure is DialFailure.HANDSHAKE_UNFINISHED:
            self.silent, self._rounds = 0.0, 0  # even if the round is not finished, either
        elif failure is DialFailure.TIMED_OUT:
            self._failures[-1] = DialFailure.OF_THIS_MACHINE  # the time was ours

    def _settle_silence(self) -> None:
        """Add what the round says."""
        failures = set(self._failures)
        is_silent = bool(failures & {DialFailure.NO_ANSWER, DialFailure.TIMED_OUT})
        if is_silent and not failures & {
            DialFailure.OF_THIS_MACHINE,
            DialFailure.HANDSHAKE_UNFINISHED,
        }:
            self._counts = True
            self.silent += self._round_silent
            self._rounds += 1
