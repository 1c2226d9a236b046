"""The workers of `farcall.local(n, processes=False)`: agents of this process, in threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # as in stores.py

from farcall import rpc
from farcall.autograd.autograd import Autograd
from farcall.groups.joining import DRIVER, GENERATION, settings
from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.membership.endpoints import EndpointPlace, ListeningEndpoint
from farcall.runtime.options.credential import Credential, Credentials
from farcall.runtime.quirks import Quirks
from farcall.runtime.start import start_agent
from farcall.transport.brief_threads import Several
from farcall.transport.inproc import InprocEndpoint, InprocNetwork

_groups: weakref.WeakSet[Threads] = weakref.WeakSet()  # whose agents live in this process


def _after_fork_in_child() -> None:
    for threads in list(_groups):
        threads.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class _InProcessOptions(rpc.RpcBackendOptions):
    """Options of an agent whose frames stay in this process."""

    network: InprocNetwork

    def open_endpoint(self, place: EndpointPlace) -> ListeningEndpoint:
        me = place.me
        worker = Worker(
            me.name, me.id, me.incarnation, host=me.host, pid=os.getpid(), strict=me.strict
        )
        endpoint: Any = InprocEndpoint(self.network, worker, place.admit, place.meeting)
        return endpoint  # type: ignore[no-any-return]


class _OwnCredentials(Credentials):
    """Leaves the environment alone: the secret was made for these agents."""

    def choose(self, options: Any) -> Credential:
        return Credential(options.secret, confined=False)


class Threads:
    """Workers that are agents of this process. The same methods as `Crew`.

    Args:
        names: of the workers, by rank.
        options: keywords of `RpcBackendOptions`.
    """

    def __init__(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self._names = names
        given = {"secret": rpc.Secret.generate(), **options, "store": HashStore()}
        keywords, self._limit = settings(given)
        self._options = _InProcessOptions(**keywords)
        self._options.network = InprocNetwork()
        self._agents: list[Agent] = []

    def start(self) -> Agent:
        """Start all agents, of which the driver's becomes this process's own; return that."""
        size = len(self._names) + 1
        starts = [
            partial(self._start_worker, rank, name, size) for rank, name in enumerate(self._names)
        ]
        starting = Several("farcall-group", starts, size)  # each waits for the others
        try:
            driver = rpc.start_default_agent(
                DRIVER, size - 1, size, self._options, Quirks(), GENERATION
            )
        finally:
            self._agents = starting.results()
            _groups.add(self)
        for agent in (driver, *self._agents):
            agent.status.rpc_timeout = self._limit
        return driver

    def _start_worker(self, rank: int, name: str, size: int) -> Agent:
        return start_agent(
            name, rank, size, self._options, _OwnCredentials(), GENERATION, Quirks(), Autograd
        )

    def ended(self) -> set[int]:
        """Return the empty set: none dies alone."""
        return set()

    def how_it_ended(self, number: int, seconds: float) -> str | None:
        """Return None: none dies alone."""
        return None

    def show_output(self) -> None:
        """Do nothing: what functions print is this process's own output."""

    def logs(self, name: str, last: int | None) -> list[str]:
        """Return no lines: what functions print is this process's own output."""
        return []

    def leave(self, patience: float) -> None:
        """Shut all agents down, once nothing is in flight any more.

        Raises:
            RpcTimeout: functions are still running after these seconds.
        """
        ends = [partial(agent.shutdown, True, patience) for agent in self._agents]
        ending = Several("farcall-group", ends, len(ends))
        try:
            rpc.shutdown(timeout=patience)
        finally:
            ending.results()

    def close_after_fork(self) -> None:
        """Close the workers in a child that was forked, as `rpc` does with the driver's."""
        for agent in self._agents:
            agent.close_after_fork()

    def close(self, patience: float) -> None:
        """Shut all agents down that are still there."""
        for agent in self._agents:
            agent.close()
