"""Actors of Ray, one for each worker, in one placement group; and the store where workers meet."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.client import ray as client
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in stores.py

from farcall.ray.obituaries import in_words
from farcall.ray.placement import Wishes, actor_options
from farcall.ray.sealing import seal
from farcall.ray.worker import FarcallWorker, WorkerArrival
from farcall.runtime.membership.stores import host_store_at

_LAST_OUTPUT = 0.5  # seconds for Ray to show the last output, as it takes itself at an exit
_THREADS = 3  # of an actor: one works, one is told to leave, one is asked for its output


class Actors:
    """Actors of Ray, to which this process is connected, or connects for as long as they live.

    Args:
        names: of the workers, by rank.
        wishes: what they need, and where.

    Raises:
        RuntimeError: Ray is connected to another cluster, or by Ray Client.
        ConnectionError: there is no cluster at the address.

    Attributes:
        names: of the workers.
        handles: of the actors.
        arrivals: what they say of themselves.
        address: of this process's node.
        store: that this process hosts at that address; None before the start and after the end.
    """

    def __init__(self, names: Sequence[str], wishes: Wishes) -> None:
        self.names = tuple(names)
        self.handles: list[Any] = []
        self.arrivals: list[WorkerArrival] = []
        self._wishes = wishes
        self._room: Any = None
        self._is_own = _connect(wishes.address)
        self.address: str = ray.util.get_node_ip_address()
        self.store: TCPStore | None = None

    def start(self) -> TCPStore:
        """Have Ray find room and start all actors; return the store.

        Raises:
            RuntimeError: Ray has no room, or can't start one; the message says why.
        """
        wishes = self._wishes
        deadline = time.monotonic() + wishes.seconds if wishes.seconds else None
        self._room = ray.util.placement_group(list(wishes.bundles), strategy=wishes.strategy)
        self._wait(self._room.ready(), deadline, self._no_room)
        self.handles = [self._make(number) for number in range(len(self.names))]
        arrivals = [handle.arrive.remote() for handle in self.handles]
        for number, arrival in enumerate(arrivals):
            self.arrivals.append(self._arrival_of(number, arrival, deadline))
        self.store = _host_store(self.address)
        return self.store

    def sealed(self, number: int, message: bytes) -> bytes:
        """Return a message as only this worker can read it."""
        return seal(message, self.arrivals[number].key)

    def failure(self, number: int, reason: str | None) -> RuntimeError:
        """Return the error of a worker that could not start."""
        return RuntimeError(f"{self.names[number]!r} could not start: {reason}")

    def kill(self) -> None:
        """Kill all that are left, and give their room back."""
        if not ray.is_initialized():  # then they have ended
            return
        for handle in self.handles:
            ray.kill(handle)
        if self._room is not None:
            ray.util.remove_placement_group(self._room)

    def close(self) -> None:
        """End the store, and the connection to Ray if it was made for these actors."""
        self.store = None
        if self._is_own:
            time.sleep(_LAST_OUTPUT)
            ray.shutdown()

    def _wait(self, ref: Any, deadline: float | None, late: Callable[[], str]) -> Any:
        seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            return ray.get(ref, timeout=seconds)
        except GetTimeoutError:
            raise RuntimeError(late()) from None

    def _no_room(self) -> str:
        bundles, strategy, seconds = self._wishes[:3]
        nodes = [_of_users(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        return (
            f"Ray has no room for {len(bundles)} workers with the resources {bundles} and the "
            f"strategy {strategy!r} after {seconds:g} s: its nodes have {nodes}, of which "
            f"{_of_users(ray.available_resources())} in all are free"
        )

    def _make(self, number: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._room, number)
        options = actor_options(self._wishes.bundles[number])
        actor = ray.remote(FarcallWorker).options(
            **options, scheduling_strategy=place, max_concurrency=_THREADS, max_restarts=0
        )
        return actor.remote(self.names[number])

    def _arrival_of(self, number: int, arrival: Any, deadline: float | None) -> WorkerArrival:
        late = f"Ray has not started {self.names[number]!r} after {self._wishes.seconds:g} s"
        try:
            found: WorkerArrival = self._wait(arrival, deadline, lambda: late)
            return found
        except RayError as error:
            raise self.failure(number, in_words(error)) from None


def _connect(address: str | None) -> bool:
    """Connect to a cluster, unless that is done; return whether it was done now."""
    place = os.environ.get("RAY_ADDRESS", "") if address is None else address
    if client.is_connected() or (place.startswith("ray://") and not ray.is_initialized()):
        raise RuntimeError(
            "a driver of Ray Client (ray://) is outside of the cluster, where the workers can't "
            "reach it: run this program in the cluster, for instance by `ray job submit`"
        )
    if not ray.is_initialized():
        ray.init(address)
        return True
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise RuntimeError(
            f"Ray is connected to the cluster at {here} already: leave out the address, "
            f"{address!r}, or call ray.shutdown() first"
        )
    return False


def _host_store(address: str) -> TCPStore:
    """Return a store that this process hosts at one address of its machine, at any free port."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    return host_store_at(socket.create_server((address, 0), family=family))


def _of_users(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that a user thinks of: no addresses of nodes, no memory."""
    return {
        name: amount
        for name, amount in resources.items()
        if not name.startswith("node:") and "memory" not in name
    }
