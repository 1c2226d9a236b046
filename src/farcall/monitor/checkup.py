"""`doctor`: looks at this machine, and at the workers of this user and the paths between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from farcall.monitor import installation, machine
from farcall.monitor.asking import SECONDS, AskResult, Contact, ask_and_keep, ask_one
from farcall.monitor.findings import LEVELS, Finding, fine
from farcall.monitor.hangs import explain
from farcall.monitor.hearing import Hearing
from farcall.runtime.inspection.reports import MemberReport, Question
from farcall.transport.brief_threads import Several

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    installation.versions,
    installation.secret,
    machine.names,
    machine.ports,
    machine.limits,
    machine.memory,
    machine.clock,
)
SKEW = 2.0  # seconds between the clocks of two hosts
MEASURE_SECONDS = 10.0
ONE_PAIR = 5.0  # seconds that a worker has to measure one path
SLOW_CALL = 0.05  # seconds; then the other side is busy, or the network is


class Pair(NamedTuple):
    """The path of one worker's calls to another one.

    Attributes:
        caller: the name of the worker.
        path: its knowledge of the other one, and the measurements.
    """

    caller: str
    path: MemberReport


class Diagnosis(NamedTuple):
    """The findings of `doctor`.

    Attributes:
        findings: what matters most comes first.
        pairs: the paths between workers that answered.
        unmeasured: why some of these were not measured, or "".
    """

    findings: list[Finding]
    pairs: list[Pair]
    unmeasured: str


def doctor(
    *,
    measure: bool | None = None,
    group: int | None = None,
    timeout: float = SECONDS,
    seconds: float = MEASURE_SECONDS,
) -> Diagnosis:
    """Look at this machine, at the workers that `ask_all` finds, and at the paths between them.

    Blocks the calling thread; thread-safe. It changes nothing.

    Args:
        measure: measure latency and bandwidth of the paths, one after the other, by calls that
            load the workers a little; None: only if nothing hangs.
        group: only the group of this process of this machine.
        timeout: seconds; a worker that does not answer in that time is silent.
        seconds: no further path is measured after so many seconds.

    Raises:
        ValueError: the credentials of this process can't be used; the message says why.
    """
    checks = Several("farcall-doctor", [partial(_of_machine, one) for one in CHECKS], len(CHECKS))
    asked = time.time()
    try:
        answer, contacts = ask_and_keep(stacks=True, timeout=timeout)
    finally:
        answered = time.time()
        here = checks.results()
    if group is not None:
        answer = answer.of_group(group)
    hangs = explain(answer._replace(silent=[one for one in answer.silent if not one.refuses]))
    findings = [Finding("wrong", "hang", line) for line in hangs]
    pairs = [
        Pair(report.name, one)
        for report in answer.reports
        for one in report.members
        if not one.loss_cause
    ]
    unmeasured = ""
    if measure or (measure is None and not findings):
        pairs, unmeasured = _measured(answer, contacts, pairs, seconds)
    elif pairs:
        unmeasured = "something hangs" if measure is None else "that was not wanted"
    findings += [one for found in here for one in found]
    findings += [*of_group(answer, asked, answered), *of_pairs(pairs, answer)]
    # A process may have several workers that give the same answer.
    return Diagnosis(sorted(dict.fromkeys(findings), key=_rank), pairs, unmeasured)


def _of_machine(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return list(check())


def _rank(finding: Finding) -> int:
    return LEVELS.index(finding.level)


def _measured(
    answer: AskResult, contacts: dict[int, Contact], pairs: list[Pair], seconds: float
) -> tuple[list[Pair], str]:
    """Return the pairs with their measurements, and why these are not all."""
    callers = {report.name: report for report in answer.reports}
    until = time.monotonic() + seconds
    found, left, hearing = [], 0, Hearing()
    for pair in pairs:
        caller = callers[pair.caller]
        if time.monotonic() >= until:
            left += 1
            found.append(pair)
            continue
        question = Question(measures=pair.path.name)
        told = ask_one(contacts[caller.incarnation], question, ONE_PAIR, hearing)
        if isinstance(told, str) or not told.members:
            found.append(pair)
        else:
            found.append(Pair(pair.caller, told.members[0]))
    return found, f"{left} paths: the {seconds:g} s were over" if left else ""


def of_group(answer: AskResult, asked: float, answered: float) -> Iterator[Finding]:
    """Yield what there is to say of workers, each by itself.

    Args:
        asked, answered: between which times of this machine's clock, in seconds since 1970, they
            described themselves.
    """
    reports = answer.reports
    for one in answer.silent:
        if one.refuses:
            yield Finding(
                "look",
                "workers",
                f"{one.name or f'a worker (pid {one.pid})'} says nothing of itself: {one.why}",
                "set FARCALL_SECRET or certificates as its group has them",
            )
    if not reports:
        yield fine("workers", "there are none of this user on this machine, or none that answers")
        return
    yield fine("workers", ", ".join(f"{one.name} (pid {one.pid} on {one.host})" for one in reports))
    running: dict[str, list[str]] = {}
    for report in reports:
        running.setdefault(report.versions, []).append(report.name)
    if len(running) > 1:
        said = "; ".join(f"{', '.join(names)}: {one}" for one, names in sorted(running.items()))
        yield Finding(
            "look", "versions", f"workers differ: {said}", "install the same on all machines"
        )
    for report in reports:
        if report.transport == "socket":
            yield Finding(
                "look",
                "transport",
                f"{report.name} runs without the native transport: its calls are slower",
                "see the finding about the transport on its machine; or FARCALL_TRANSPORTS",
            )
        skew = report.clock - min(max(report.clock, asked), answered)
        if report.clock and abs(skew) > SKEW:
            yield Finding(
                "look",
                "clock",
                f"the clock of {report.name} on {report.host} is {skew:+.1f} s off from this one",
                "set both by NTP: certificates and signatures need the time",
            )
        for member in report.members:
            if member.losses:
                yield Finding(
                    "look",
                    "network",
                    f"{report.name} has lost {member.name} {member.losses} times, and met it again",
                    "a host that stands still or a network that breaks; see dead_host_timeout",
                )


def of_pairs(pairs: list[Pair], answer: AskResult) -> Iterator[Finding]:
    """Yield what there is to say of the paths between workers."""
    hosts = {report.name: report.host for report in answer.reports}
    reasons: dict[str, list[str]] = {}
    for caller, path in pairs:
        way = f"{caller} -> {path.name}"
        if path.unreached:
            yield Finding("wrong", "path", f"{way}: {path.unreached}", "")
        if path.latency is not None and path.latency > SLOW_CALL:
            yield Finding(
                "look",
                "path",
                f"{way}: a call that does nothing takes {path.latency * 1e3:.0f} ms",
                "its functions may hold Python's lock (GIL), or its cores or the network are busy",
            )
        if path.protection == "none" and hosts.get(caller) != path.host:
            reasons.setdefault("nothing encrypts or authenticates it", []).append(way)
        if path.drawback and hosts.get(caller) == path.host:
            kind = path.path.partition(" ")[0]
            reasons.setdefault(f"over {kind}: {path.drawback}", []).append(way)
    for reason, ways in reasons.items():
        more = f" and {len(ways) - 3} others" if len(ways) > 3 else ""
        yield Finding("look", "path", f"{', '.join(ways[:3])}{more}: {reason}", "")
