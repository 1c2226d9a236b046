"""Several workers in one process, each with an agent of its own: how most tests run.

with cluster(2) as (w0, w1), acting_as(w0):
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from farcall.autograd.recorder import Autograd
from farcall.ids import Worker, new_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.context import CallContext, current
from farcall.runtime.endpoints import open_endpoint
from farcall.transport.base import Endpoint
from farcall.transport.handshake import Identity
from farcall.transport.inproc import InprocEndpoint, InprocNetwork
from farcall.transport.listening import Listening

Transport = Literal["inproc", "socket", "native"]
TRANSPORTS: tuple[Transport, ...] = ("inproc", "socket")
if find_spec("farcall._native") is not None:
    TRANSPORTS += ("native",)


@contextmanager
def acting_as(agent: Agent) -> Iterator[Agent]:
    """Make `agent` the one that the functions of `farcall.rpc` use inside the block."""
    token = current.set(CallContext(agent))
    try:
        yield agent
    finally:
        current.reset(token)


@contextmanager
def cluster(
    size: int, *, transport: Transport = "inproc", secret: bytes | None = None, **options: Any
) -> Iterator[list[Agent]]:
    """Start workers "w0", "w1", ... that know each other; at the end, close them at once.

    Args:
        size: number of workers.
        transport: what their frames travel over.
        secret: authenticates links, of all transports but inproc.
        options: for every `Agent`: `rpc_timeout` (seconds), `num_worker_threads`, `policy`, ...
    """
    listen = _listener(transport, secret)
    starting = [listen(f"w{rank}", rank) for rank in range(size)]
    workers = [worker for worker, _, _ in starting]
    agents = []
    try:
        for worker, endpoint, gate in starting:
            others = [other for other in workers if other is not worker]
            gate.agent = Agent(worker, endpoint, workers=others, gradients=Autograd, **options)
            agents.append(gate.agent)
        yield agents
    finally:
        for agent in agents:
            agent.close()
        for _, endpoint, _ in starting[len(agents) :]:
            endpoint.close()


class _Gate:
    """Passes on who dials in to an agent that is made after its endpoint."""

    agent: Agent | None = None

    def admit(self, name: str, incarnation: int) -> str | None:
        return None if self.agent is None else self.agent.admit(name, incarnation)


def _listener(
    transport: Transport, secret: bytes | None
) -> Callable[[str, int], tuple[Worker, Endpoint, _Gate]]:
    network = InprocNetwork()

    def listen(name: str, rank: int) -> tuple[Worker, Endpoint, _Gate]:
        gate = _Gate()
        incarnation = new_incarnation()
        endpoint: Endpoint
        if transport == "inproc":
            unaddressed = Worker(name, rank, incarnation, host="here", pid=os.getpid())
            endpoint = InprocEndpoint(network, unaddressed, gate.admit)
        else:
            identity = Identity(name, rank, incarnation, "here")
            endpoint = open_endpoint(
                (transport,), identity, Listening(secret=secret, admit=gate.admit)
            )
        worker = Worker(name, rank, incarnation, endpoint.addresses, "here", os.getpid())
        return worker, endpoint, gate

    return listen
