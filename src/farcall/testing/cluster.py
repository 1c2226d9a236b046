"""Several workers in one process, each with an agent of its own: how most tests run.

with cluster(2) as (w0, w1), acting_as(w0):
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from torch.distributed import HashStore  # type: ignore[attr-defined]  # as in stores.py

from farcall.autograd.autograd import Autograd
from farcall.ids import Worker, new_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.calls.policy import Policy
from farcall.runtime.context import CallContext, reset_context, set_context
from farcall.runtime.membership.endpoints import open_endpoint
from farcall.runtime.membership.losses import Reception
from farcall.runtime.process_groups.gloo import GlooGroup
from farcall.serde import Only
from farcall.transport.base import Endpoint
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.inproc import InprocEndpoint, InprocNetwork
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint

Transport = Literal["inproc", "socket", "native", "process_group"]
# A process group is slow to make, so only some tests run on it, too.
TRANSPORTS: tuple[Transport, ...] = ("inproc", "socket")
if find_spec("farcall._native") is not None:
    TRANSPORTS += ("native",)


@contextmanager
def acting_as(agent: Agent) -> Iterator[Agent]:
    """Make `agent` the one that the functions of `farcall.rpc` use inside the block."""
    token = set_context(CallContext(agent))
    try:
        yield agent
    finally:
        reset_context(token)


@contextmanager
def cluster(
    size: int,
    *,
    transport: Transport = "inproc",
    secret: bytes | None = None,
    policies: Mapping[str, Only | Mapping[str, Only]] | None = None,
    **options: Any,
) -> Iterator[list[Agent]]:
    """Start workers "w0", "w1", ... that know each other; at the end, close them at once.

    Args:
        size: number of workers.
        transport: what their frames travel over.
        secret: authenticates links, of "socket" and "native".
        policies: by name of a worker, what others may do there.
        options: for every `Agent`: `rpc_timeout` (seconds), `num_worker_threads`, ...
    """
    policies = policies or {}
    listen = _listener(transport, secret, size, policies.keys())
    starting = [listen(f"w{rank}", rank) for rank in range(size)]
    workers = [worker for worker, _, _ in starting]
    agents = []
    try:
        for worker, endpoint, gate in starting:
            others = [other for other in workers if other is not worker]
            policy = Policy(policies.get(worker.name))
            agent = Agent(
                worker, endpoint, workers=others, gradients=Autograd, policy=policy, **options
            )
            gate.open(agent.losses)
            agents.append(agent)
        yield agents
    finally:
        for agent in agents:
            agent.close()
        for _, endpoint, gate in starting[len(agents) :]:
            gate.open(None)
            endpoint.close()


def connected(size: int) -> list[GlooGroup]:
    """Return every rank of a new process group."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:  # each waits for the others
        return list(pool.map(lambda rank: GlooGroup(store, rank, size, "127.0.0.1"), range(size)))


def _listener(
    transport: Transport, secret: bytes | None, size: int, strict: Collection[str]
) -> Callable[[str, int], tuple[Worker, Endpoint, Reception]]:
    network = InprocNetwork()
    groups = connected(size) if transport == "process_group" else []

    def listen(name: str, rank: int) -> tuple[Worker, Endpoint, Reception]:
        gate = Reception()
        incarnation = new_incarnation()
        endpoint: Endpoint
        if transport == "inproc":
            unaddressed = Worker(
                name, rank, incarnation, host="here", pid=os.getpid(), strict=name in strict
            )
            endpoint = InprocEndpoint(network, unaddressed, gate.admit, gate.meeting)
        elif transport == "process_group":
            identity = Identity(name, rank, incarnation, "here", strict=name in strict)
            endpoint = ProcessGroupEndpoint(identity, groups[rank], gate.admit)
        else:
            identity = Identity(name, rank, incarnation, "here", strict=name in strict)
            endpoint = open_endpoint(
                (transport,),
                identity,
                Listening(secret=secret, admit=gate.admit, meeting=gate.meeting),
            )
        worker = Worker(
            name,
            rank,
            incarnation,
            endpoint.addresses,
            "here",
            os.getpid(),
            strict=name in strict,
        )
        return worker, endpoint, gate

    return listen
