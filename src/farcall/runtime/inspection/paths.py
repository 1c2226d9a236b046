"""The path that calls to another worker take, and why they take no better one."""

from __future__ import annotations

import math
import statistics
import time

import msgspec
import torch

from farcall.errors import FarcallError, LinkError
from farcall.ids import Worker, meeting_of
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.context import waiting
from farcall.runtime.inspection.reports import MemberReport
from farcall.runtime.membership.hosts import host_name
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import Link, Means
from farcall.transport.connect.addresses import UNIX

WARM_CALLS = 3
MOST_CALLS = 100
LATENCY_SECONDS = 0.05  # that calls for the latency take in all
FIRST_BYTES = 1 << 20
MOST_BYTES = 32 << 20
BANDWIDTH_SECONDS = 0.2


def look_at(agent: Agent, peer: Peer) -> MemberReport:
    """Return what an agent knows of another worker, and of the path there. Never waits."""
    worker = peer.worker
    link = agent.links.linked(peer) or peer.back_link
    means = agent.endpoint.means
    return MemberReport(
        worker.name,
        worker.id,
        worker.incarnation,
        host_name(worker.host),
        worker.pid,
        worker.addresses,
        "" if link is None else link.description,
        len(peer.outgoing),
        peer.outbox.waiting_bytes + peer.back_outbox.waiting_bytes,
        peer.admission.reads,
        peer.loss_cause or "",
        drawback="" if link is None else drawback(link, means, agent.me, worker),
        protection="" if link is None else protection(link, means),
        losses=meeting_of(worker.incarnation),
        received=peer.incoming.received,
    )


def reached(agent: Agent, peer: Peer, seconds: float) -> MemberReport:
    """Make the link to another worker if there is none, and return its description.

    Args:
        seconds: what that may take; 0: any time.
    """
    failure = ""
    try:
        with waiting():
            agent.links.connect(peer, time.monotonic() + seconds if seconds else math.inf)
    except TimeoutError:
        failure = f"it does not answer within {seconds:g} s"
    except LinkError as error:
        failure = str(error)
    return msgspec.structs.replace(look_at(agent, peer), unreached=failure)


def measured(agent: Agent, peer: Peer, seconds: float) -> MemberReport:
    """Measure the path to another worker by calls, and return its description with the times.

    It makes the link if there is none, and sends up to 64 MB.

    Args:
        seconds: what each call may take; 0: any time.
    """
    latency = bandwidth = None
    failure = ""
    try:
        latency = _latency(agent, peer, seconds)
        bandwidth = _bandwidth(agent, peer, seconds)
    except FarcallError as error:
        failure = str(error)
    return msgspec.structs.replace(
        look_at(agent, peer), latency=latency, bandwidth=bandwidth, unreached=failure
    )


@own_handler("a measurement of the path", checks_itself=True)
def take(payload: object) -> None:
    """Do nothing, at the other end of a measurement."""


def _latency(agent: Agent, peer: Peer, seconds: float) -> float:
    took: list[float] = []
    until = time.monotonic() + LATENCY_SECONDS
    for number in range(WARM_CALLS + MOST_CALLS):
        began = time.perf_counter()
        agent.call(peer.name, take, (None,), None, seconds)
        took.append(time.perf_counter() - began)
        if number >= WARM_CALLS and time.monotonic() >= until:
            break
    return statistics.median(took[WARM_CALLS:])


def _bandwidth(agent: Agent, peer: Peer, seconds: float) -> float:
    best, size = 0.0, FIRST_BYTES
    until = time.monotonic() + BANDWIDTH_SECONDS
    while size <= MOST_BYTES and time.monotonic() < until:
        payload = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        agent.call(peer.name, take, (payload,), None, seconds)
        best = max(best, size / (time.perf_counter() - began))
        size *= 2
    return best


def protection(link: Link, means: Means) -> str:
    """Return what protects what goes over a link: see `MemberReport`."""
    is_near = link.description.startswith(("shm", "unix", "loopback", "inproc"))
    return "local" if is_near else means.protection


def drawback(link: Link, means: Means, me: Worker, worker: Worker) -> str:
    """Return why calls to a worker take no better path than a link's, or ""."""
    path = link.description.partition(" ")[0]
    if link.drawback:
        return link.drawback
    if path == "unix":
        return f"this worker runs on the transport {means.transport!r}, which has no shared memory"
    if path != "tcp":
        return ""
    if me.host != worker.host:
        return _elsewhere(me.host, worker.host) + _slower(means)
    if not {"shm", "unix"} & set(means.paths):
        return "neither shared memory nor Unix sockets are among this worker's paths (option paths)"
    if not any(url.startswith(UNIX) for url in worker.addresses):
        return (
            f"{worker.name} listens on no Unix socket: neither shared memory nor Unix sockets are "
            "among its paths (option paths), or its system forbids them"
        )
    return (
        f"the Unix socket of {worker.name} could not be used: it may belong to another user; the "
        "log of `farcall.transport` says more at the level DEBUG"
    )


def _elsewhere(mine: str, other: str) -> str:
    name, boot, _ = [*mine.split("/", 2), "", ""][:3]
    if boot and boot == [*other.split("/", 2), ""][1]:
        return f"it runs on {name}, too, but in another network namespace (a container)"
    return f"it runs on another host, {host_name(other)}"


def _slower(means: Means) -> str:
    """Say what makes TCP slower than it could be."""
    said = ""
    if means.transport != "native":
        said += f"; the transport {means.transport!r} uses one connection, and is slower"
    if means.protection == "encrypted":
        said += "; encrypt=False on all workers authenticates only, which is faster"
    return said
