"""Caller or callee stands still for 20 s at each stage of a call: GIL held in C, or SIGSTOP.

All pairs stand at the same time: they have nothing to do with each other.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from dataclasses import dataclass

from crew import Crew, Member, assembled, join
from report import Report, Settings
from steps import (
    Outcome,
    attempt,
    attempt_while_holding,
    call_until_value,
    hold_interpreter,
    listen,
    losses,
)  # fmt: skip

STANDS = 20  # seconds
TIMEOUT = 5.0
ALLOWED = 1.0
# When the process begins to stand, in seconds after the call's begin.
STAGES = {"before the dial": -0.3, "in the dial": 0.005, "in the call": 0.5, "after it": -0.3}


@dataclass
class Pair:
    how: str  # "GIL" or "SIGSTOP"
    who: str  # the one that stands
    stage: str
    caller: Member
    callee: Member
    call_at: float = 0.0
    stand_at: float = 0.0
    resumed: float = 0.0
    outcome: Outcome | None = None

    def plan(self, at: float, jitter: float) -> None:
        self.call_at = at
        self.stand_at = at + STAGES[self.stage]
        if self.stage == "in the dial":
            self.stand_at += jitter

    def begin(self) -> None:
        to, lasts = self.callee.name, 2.0 if self.stage == "in the call" else 0.0
        if self.how == "GIL" and self.who == "caller":
            self.caller.start(attempt_while_holding, to, TIMEOUT, self.call_at, lasts,
                              self.stand_at, STANDS)  # fmt: skip
            return
        if self.how == "GIL":
            self.callee.start(hold_interpreter, self.stand_at, STANDS)
        self.caller.start(attempt, to, TIMEOUT, self.call_at, lasts)

    @property
    def standing(self) -> Member:
        return self.caller if self.who == "caller" else self.callee

    def finish(self) -> None:
        result = self.caller.result()
        if self.how == "GIL" and self.who == "caller":
            self.outcome, self.resumed = result
            return
        self.outcome = result
        if self.how == "GIL":
            self.resumed = self.callee.result()

    def lateness(self) -> float:
        """Seconds after the deadline; a caller that stood then may be late by that time."""
        deadline = self.outcome.began + TIMEOUT
        if self.who == "caller":
            deadline = max(deadline, self.resumed)
        return self.outcome.ended - deadline


def make_pair(crew: Crew, folder: str, how: str, who: str, stage: str) -> Pair:
    pair = Pair(how, who, stage, crew.member("caller"), crew.member("callee"))
    for rank, member in enumerate((pair.caller, pair.callee)):
        member.start(join, member.name, rank, 2, f"file://{folder}/{how}-{who}-{stage}")
    return pair


def stop_and_resume(pairs: list[Pair]) -> None:
    stopped = sorted((p for p in pairs if p.how == "SIGSTOP"), key=lambda p: p.stand_at)
    for pair in stopped:
        time.sleep(max(0.0, pair.stand_at - time.monotonic()))
        pair.standing.signal(signal.SIGSTOP)
    for pair in stopped:
        time.sleep(max(0.0, pair.stand_at + STANDS - time.monotonic()))
        pair.standing.signal(signal.SIGCONT)
        pair.resumed = time.monotonic()


def trial(report: Report, settings: Settings) -> None:
    jitter = random.Random(settings.seed)
    with assembled(f"{settings.folder}/stands") as crew:
        pairs = [
            make_pair(crew, str(settings.folder), how, who, stage)
            for how, who, stage in itertools.product(
                ("GIL", "SIGSTOP"), ("caller", "callee"), STAGES
            )
        ]
        for pair in pairs:
            for member in (pair.caller, pair.callee):
                member.result()
                member.run(listen)
            if pair.stage == "after it":
                assert pair.caller.run(call_until_value, "callee", TIMEOUT) is not None
        at = time.monotonic() + 1.0
        for pair in pairs:
            pair.plan(at, jitter.uniform(0.0, 0.02))
        for pair in pairs:
            pair.begin()
        stop_and_resume(pairs)
        for pair in pairs:
            pair.finish()
            _judge(report, pair)


def _judge(report: Report, pair: Pair) -> None:
    again = pair.caller.run(call_until_value, "callee", 30.0)
    back = pair.callee.run(call_until_value, "caller", 30.0)
    dead = pair.caller.run(losses) + pair.callee.run(losses)
    late = pair.lateness()
    is_met = (
        pair.outcome.kind in ("value", "RpcTimeout") and late <= ALLOWED and not dead
        and again is not None and back is not None
    )  # fmt: skip
    report.demand(
        f"{pair.who}, {pair.how} {pair.stage}: outcome, none dead",
        f"{pair.outcome.kind} {late:+.2f} s after the deadline, dead {dead}, "
        f"then calls take {again or -1:.2f} and {back or -1:.2f} s",
        is_met,
    )
