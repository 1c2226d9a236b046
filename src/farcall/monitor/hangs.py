"""The causes of hangs: sentences about what workers wait for, the likeliest cause first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from farcall.monitor.asking import AskResult, SilentWorker
from farcall.monitor.finding import busy_threads, descriptors_of
from farcall.runtime.inspection.reports import (
    ARRIVAL,
    CallReport,
    GatheringReport,
    LoopReport,
    ThreadReport,
    WaitReport,
    WorkerReport,
)

LONG = 1.0  # seconds from which a wait is worth a word
MOST_NAMES = 5  # of many workers that are in the same case
MANY_FILES = 0.9  # of the descriptors that a process may have: it will soon have no more
MOST_LOOPS = 2  # so many come before causes of other kinds
BEFORE_LOOPS = 3  # lines, at most: the first five have the cause
MOST_CHAINS = 1000  # that are followed: those of the calls that are open for the longest
MOST_STEPS = 100  # of one chain
_NOT_COME = "for which there is no end before the others come"


class _Step(NamedTuple):
    """One call on the way from a waiting thread to the cause of its wait."""

    caller: str
    call: CallReport


class _Chain(NamedTuple):
    """The waits of a thread, call by call, and the end of the chain.

    Attributes:
        end: a clause about who or what does not go on.
        turns: whether the way comes back to a worker that waits on it.
    """

    steps: list[_Step]
    end: str
    turns: bool

    @property
    def seconds(self) -> float:
        """Return how long the first call has been open; infinity if that is unknown."""
        return _age(self.steps[0].call)


def explain(answer: AskResult) -> list[str]:
    """Return what hangs, a sentence each, the likeliest causes first; nothing if nothing does.

    Args:
        answer: of `ask_all(stacks=True)`.
    """
    chains = [
        chain
        for chain in _Graph(answer).chains()
        if chain.seconds >= LONG and not _is_of_gathering(chain)
    ]
    chains.sort(key=lambda chain: (not chain.turns, -len(chain.steps), -chain.seconds))
    waited_for = Counter(chain.steps[-1].call.worker for chain in chains)
    lines = [_of_silent(one, waited_for[one.name]) for one in answer.silent]
    lines += [line for report in answer.reports for line in _of_group(report, answer)]
    lines += [
        _of_gathering(one, answer)
        for report in answer.reports
        for one in report.gatherings
        if one.seconds >= LONG
    ]
    lines += [
        f"{report.name} {_of_wait(one.awaits)}, at {one.place}"
        for report in answer.reports
        for one in report.threads
        if one.awaits is not None and one.awaits.seconds >= LONG
    ]
    lines += [line for report in answer.reports for line in _of_queues(report)]
    lines += [_of_chain(chain) for chain in chains]
    # A loop's thread that waits for a call is held up by what the chain of that call says.
    waiting, blocked = _of_loops(answer, waits=True), _of_loops(answer, waits=False)
    lines[BEFORE_LOOPS:BEFORE_LOOPS] = waiting[:MOST_LOOPS]
    first = min(len(answer.silent), BEFORE_LOOPS)
    lines[first:first] = blocked[:MOST_LOOPS]
    return list(dict.fromkeys(lines + blocked + waiting))


def _of_loops(answer: AskResult, *, waits: bool) -> list[str]:
    """Return a sentence about each event loop that holds up coroutines, the longest first.

    Args:
        waits: those whose thread waits for a call, a worker or the store, or the others.
    """
    found = [
        (one.loop, one, report)
        for report in answer.reports
        for one in report.threads
        if one.loop is not None and one.loop.seconds >= LONG and one.loop.ready
        if waits == ((one.waits_for or one.awaits) is not None)
    ]
    found.sort(key=lambda item: -item[0].seconds)
    return [_of_loop(loop, thread, report) for loop, thread, report in found]


def _of_loop(loop: LoopReport, thread: ThreadReport, report: WorkerReport) -> str:
    wait = "coroutine waits" if loop.ready == 1 else "coroutines wait"
    return (
        f"the event loop of thread {thread.name} of {report.name} is blocked since "
        f"{loop.seconds:.0f} s, {loop.ready} {wait}: it is at {loop.place}"
    )


def _age(call: CallReport) -> float:
    return float("inf") if call.seconds is None else call.seconds


class _Node:
    """A worker that answered, with its calls and threads by what they are looked for by."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report
        self.served = {(one.worker, one.call_id): one for one in report.served}
        self.threads = {
            (one.serves.worker, one.serves.call_id): one
            for one in report.threads
            if one.serves is not None
        }
        waits = [one.waits_for for one in report.threads if one.serves is not None]
        self.awaited = {(one.worker, one.call_id) for one in waits if one is not None}


class _Graph:
    """The graph of waits between workers, by the numbers of calls."""

    def __init__(self, answer: AskResult) -> None:
        self._nodes = {report.name: _Node(report) for report in answer.reports}
        self._silent = {one.name: one for one in answer.silent}

    def chains(self) -> Iterator[_Chain]:
        """Yield the chain of each call, but for calls that a served function waits for."""
        calls = [
            (call, node)
            for node in self._nodes.values()
            for call in node.report.calls
            if (call.worker, call.call_id) not in node.awaited
        ]
        for call, node in heapq.nlargest(MOST_CHAINS, calls, key=lambda item: _age(item[0])):
            yield self._chain(node, call)

    def _chain(self, node: _Node, call: CallReport) -> _Chain:
        steps, met = list[_Step](), set[tuple[str, str, int]]()
        visited = set[str]()
        while True:
            name = node.report.name
            steps.append(_Step(name, call))
            met.add((name, call.worker, call.call_id))
            visited.add(name)
            callee = self._nodes.get(call.worker)
            if callee is None:
                return _Chain(steps, self._no_report(call.worker), turns=False)
            key = (name, call.call_id)
            served = callee.served.get(key)
            turns = call.worker in visited
            if served is None:
                why = "which has not got it" if call.state == "flies" else f"and it {call.state}"
                return _Chain(steps, why, turns)
            thread = callee.threads.get(key)
            if thread is None:
                is_gathering = call.function == ARRIVAL and callee.report.gatherings
                where = f"where it {served.state}{_full(callee.report)}"
                return _Chain(steps, _NOT_COME if is_gathering else where, turns)
            if thread.waits_for is None:
                does = f"is at {thread.place}" if thread.awaits is None else _of_wait(thread.awaits)
                return _Chain(steps, f"which {does}", turns)
            if len(steps) == MOST_STEPS:
                return _Chain(steps, "and so on", turns)
            node, call = callee, thread.waits_for
            if (node.report.name, call.worker, call.call_id) in met:
                return _Chain(steps, "and so on in a circle", turns=True)

    def _no_report(self, name: str) -> str:
        silent = self._silent.get(name)
        return "which does not answer" + (f": it {silent.state}" if silent and silent.state else "")


def _of_chain(chain: _Chain) -> str:
    first, *others = chain.steps
    text = f"{first.caller} waits for {_name(first.call)}{_since(first.call)}"
    for step in others:
        text += f", which waits for {_name(step.call)}{_since(step.call)}"
    text += f", {chain.end}"
    if chain.turns:
        ring = " -> ".join([step.caller for step in chain.steps] + [chain.steps[-1].call.worker])
        return f"a circle of waits, {ring}: {text}"
    return text


def _of_wait(wait: WaitReport) -> str:
    return f"waits since {wait.seconds:.0f} s {wait.what}"


def _is_of_gathering(chain: _Chain) -> bool:
    """Return whether a chain says no more than `_of_gathering` of the same wait."""
    return len(chain.steps) == 1 and chain.end == _NOT_COME


def _of_gathering(gathering: GatheringReport, answer: AskResult) -> str:
    reports = {report.name: report for report in answer.reports}
    text = (
        f"{_names(gathering.come)} in {gathering.what} since {gathering.seconds:.0f} s, which "
        f"{_names(gathering.missing)} must call as well"
    )
    for name in gathering.missing[:MOST_NAMES]:
        report = reports.get(name)
        if report is None:
            text += f"; {name} does not answer"
            continue
        main = [one for one in report.threads if one.name == "MainThread"]
        text += "".join(f"; {name} is at {one.place}" for one in main)
    return text


def _of_silent(silent: SilentWorker, waiting: int) -> str:
    name = silent.name or "a worker"
    where = f" (pid {silent.pid})" if silent.pid else ""
    if silent.refuses:
        return f"{name}{where} says nothing of itself: {silent.why}"
    text = f"{name}{where} does not answer"
    opened, limit = descriptors_of(silent.pid)
    if silent.state.startswith(("is stopped", "has ended")):
        text += f": it {silent.state}"
    elif limit and opened >= MANY_FILES * limit:
        text += f": {_of_files(opened, limit)}"
    elif silent.pid and (busy := busy_threads(silent.pid)):
        text += (
            f": a function in C holds Python's lock (GIL), or Python is busy; thread {busy[0]} is "
            "on a processor"
        )
    elif silent.pid:
        text += f": it {silent.state}; a function in C may wait and hold Python's lock (GIL)"
    return text + (f"; calls that wait for it: {waiting}" if waiting else "")


def _of_group(report: WorkerReport, answer: AskResult) -> Iterator[str]:
    if report.state == "starts" and report.age >= LONG:
        others = [one.name for one in answer.reports if one.state == "starts" and one != report]
        here = f"; also there: {', '.join(others)}" if others else ""
        size = f"a group of {report.world_size}" if report.world_size else "its group"
        yield (
            f"{report.name} (rank {report.id}) waits in init_rpc since {report.age:.0f} s for "
            f"others of {size}{here}"
        )
    if report.state == "leaves" and report.waits_for:
        names = _names(report.waits_for)
        yield f"{report.name} waits in shutdown for {names}: each must call shutdown as well"
    elif report.state == "leaves" and report.calls:
        call = report.calls[0]
        yield f"{report.name} waits in shutdown for {_name(call)}{_since(call)}"


def _of_files(opened: int, limit: int) -> str:
    return f"it has {opened} files open, and may have {limit} (ulimit -n)"


def _of_queues(report: WorkerReport) -> Iterator[str]:
    opened, limit = report.descriptors
    if limit and opened >= MANY_FILES * limit:
        yield f"{report.name} takes no more connections soon: {_of_files(opened, limit)}"
    queued = [call for call in report.served if call.state == "is queued"]
    if queued and (_full(report) or report.shortage):
        oldest = max(queued, key=lambda call: call.seconds or 0.0)
        why = report.shortage or f"{report.running} of {report.max_running} functions run"
        yield (
            f"{report.name} has {len(queued)} calls queued (`{oldest.function}` for "
            f"{oldest.worker}{_since(oldest)}): {why} (options num_worker_threads and max_threads)"
        )
    for member in report.members:
        if not member.is_read:
            yield (
                f"{report.name} reads no more requests of {member.name}: too many are queued "
                "(options max_queued_requests and max_queued_bytes)"
            )
        if member.unsent:
            yield (
                f"{member.unsent} bytes from {report.name} to {member.name} wait, since "
                f"{member.name} does not read"
            )


def _full(report: WorkerReport) -> str:
    if report.running < report.max_running:
        return ""
    return f": all of its {report.max_running} places for functions are taken"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _name(call: CallReport) -> str:
    return f"`{call.function}` on {call.worker}"


def _since(call: CallReport) -> str:
    return "" if call.seconds is None else f" since {call.seconds:.0f} s"
