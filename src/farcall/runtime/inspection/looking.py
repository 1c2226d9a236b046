"""A worker's report on itself."""

from __future__ import annotations

import errno
import os
import resource
import sys
import time

import msgspec

from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.inspection import threads
from farcall.runtime.inspection.paths import look_at, measured
from farcall.runtime.inspection.reports import (
    CallReport,
    GatheringReport,
    MemberReport,
    Question,
    WorkerReport,
)
from farcall.runtime.membership.hosts import host_name, versions
from farcall.runtime.membership.peers import PendingCall
from farcall.transport.connect.handshake_messages import Identity

MEASURE_SECONDS = 1.0  # that one call of a measurement may take


def report_of(agent: Agent, question: Question, began: float) -> WorkerReport:
    """Return what there is to say of a worker.

    Args:
        began: `time.monotonic()` seconds, when it did.
    """
    if question.measures:
        return msgspec.structs.replace(
            _any_state(agent.me, began), members=_measured(agent, question.measures)
        )
    seen = threads.look()
    running = {id(one.serves) for one in seen if one.serves is not None}
    now = time.monotonic()
    peers = agent.directory.all()
    calls: dict[int, CallReport] = {}
    made: list[CallReport] = []
    served: list[CallReport] = []
    for peer in peers:
        for call in peer.outgoing.records():
            made.append(_made(call, now))
            calls[id(call)] = made[-1]
            if call.future is not None:
                calls[id(call.future)] = made[-1]
        for one in peer.incoming.records():
            assert isinstance(one, ServerCall)
            served.append(_served(one, now, runs=id(one) in running))
            calls[id(one)] = served[-1]
    is_leaving = agent.status.is_leaving
    awaited = agent.coordinator.missing if is_leaving else []
    names = [peer.name for peer in map(agent.directory.of_incarnation, awaited) if peer is not None]
    return msgspec.structs.replace(
        _any_state(agent.me, began),
        state="leaves" if is_leaving else "works",
        waits_for=names,
        members=[look_at(agent, peer) for peer in peers if peer.worker is not agent.me],
        calls=made,
        served=served,
        running=agent.executor.running,
        max_running=agent.executor.max_running,
        shortage=agent.executor.shortage(),
        received=received(agent),
        gatherings=[
            GatheringReport(one.what, now - one.began, one.come, one.missing)
            for one in agent.group.gatherings.incomplete()
        ],
        transport=agent.endpoint.means.transport,
        paths=agent.endpoint.means.paths,
        references=agent.references.statistics(),
        threads=threads.reports(seen, calls) if question.stacks else [],
    )


def received(agent: Agent) -> int:
    """Return how many calls have come here, from whomever."""
    state = agent.machine.state
    return state.received_before + sum(calls.incoming.received for _, calls in list(state.peers()))


def _measured(agent: Agent, name: str) -> list[MemberReport]:
    peer = agent.directory.known(name)
    return [] if peer is None else [measured(agent, peer, MEASURE_SECONDS)]


def report_of_starting(me: Identity, question: Question, began: float) -> WorkerReport:
    """Return what there is to say of a worker whose group is not complete."""
    stacks = threads.reports(threads.look(), {}) if question.stacks else []
    return msgspec.structs.replace(_any_state(me, began), threads=stacks)


def _any_state(me: Worker | Identity, began: float) -> WorkerReport:
    return WorkerReport(
        name=me.name,
        id=me.id,
        incarnation=me.incarnation,
        host=host_name(me.host),
        pid=os.getpid(),
        versions=versions(),
        age=time.monotonic() - began,
        memory=_memory(),
        descriptors=_descriptors(),
        role=me.role,
        clock=time.time(),
    )


def _made(call: PendingCall, now: float) -> CallReport:
    is_sent = call.sent or call.future is None
    return CallReport(
        call.name,
        call.peer.name,
        call.call_id,
        now - (call.deadline - call.timeout) if call.timeout else None,
        call.timeout,
        "flies" if is_sent or call.peer.outbox.is_idle else "waits to be sent",
    )


def _served(call: ServerCall, now: float, *, runs: bool) -> CallReport:
    limit = call.request.timeout
    waits = "waits for its future" if call.is_deferred else "is queued"
    return CallReport(
        call.name,
        call.peer.name,
        call.frame.call_id,
        now - (call.deadline - limit) if limit else None,
        limit,
        "runs" if runs else waits,
    )


def _memory() -> int:
    """Return resident bytes; the most there ever were where the system says no more."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _descriptors() -> tuple[int, int]:
    limit = os.sysconf("SC_OPEN_MAX")
    try:
        return len(os.listdir("/dev/fd")), limit
    except OSError as error:
        # To count them takes one more.
        return (limit if error.errno == errno.EMFILE else 0), limit
