"""A store of torch.distributed on a simulated host, and its clients."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch.distributed import DistNetworkError

from simulator.system.locks import SimLock, me_of
from simulator.system.network import Host, Network

PATIENCE = 60.0  # seconds of a client, for one operation


class Mode(Enum):
    """The mode of a store: it answers, answers slowly, keeps silent, or is not there."""

    UP = 0
    SLOW = 1
    DARK = 2
    DEAD = 3


class StoreServer:
    """Keys and values, and whether one can get at them.

    Attributes:
        mode: what it does.
        number: counts up when it is started again, empty.
        outages: intervals in which it did not answer as it should.
    """

    def __init__(self, network: Network, host: Host) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.host = host
        self.mode = Mode.UP
        self.number = 0
        self.values: dict[str, bytes] = {}
        self.outages: list[tuple[float, float]] = []

    def is_gone(self, number: int) -> bool:
        """Return whether a client that connected to it then has lost its connection."""
        return self.mode is Mode.DEAD or self.number != number

    def start_again(self) -> None:
        """Lose everything, and all clients."""
        self.number += 1
        self.values.clear()
        self.mode = Mode.UP


class _Connection:
    """Of a client with the store: one operation at a time."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self.number = server.number
        self.lock = SimLock(server.scheduler)


class StoreClient:
    """As a `TCPStore`: one operation after the other."""

    def __init__(self, server: StoreServer, prefix: str = "") -> None:
        self._prefix = prefix
        self._connection = _Connection(server)

    def clone(self) -> StoreClient:
        """Return a new client of the same store, if it can be reached."""
        made = StoreClient(self._connection.server, self._prefix)
        made._operate(lambda values: None)
        return made

    def set_timeout(self, _: Any) -> None:
        pass

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._operate(lambda values: values.__setitem__(self._key(key), data))

    def get(self, key: str) -> bytes:
        found: bytes | None = self._operate(lambda values: values.get(self._key(key)))
        if found is None:
            raise DistNetworkError(f"the simulated store has no {key}")
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._operate(lambda values: all(self._key(key) in values for key in keys)))

    def add(self, key: str, amount: int) -> int:
        def add(values: dict[str, bytes]) -> int:
            total = int(values.get(self._key(key), b"0")) + amount
            values[self._key(key)] = str(total).encode()
            return total

        return int(self._operate(add))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        def change(values: dict[str, bytes]) -> bytes:
            present = values.get(self._key(key))
            if (present is None and not expected) or present == expected:
                values[self._key(key)] = desired
            return values.get(self._key(key), expected)

        return bytes(self._operate(change))

    def _operate(self, act: Any) -> Any:
        with self._connection.lock:
            return self._ask(act)

    def _ask(self, act: Any) -> Any:
        number, server = self._connection.number, self._connection.server
        scheduler = server.scheduler
        me = me_of(scheduler)
        host = me.process.host
        until = scheduler.now + PATIENCE
        while True:
            if server.is_gone(number):
                raise DistNetworkError("the simulated store has closed the connection")
            is_silent = server.mode is Mode.DARK or server.network.is_cut(host, server.host)
            if not is_silent:
                break
            if scheduler.now >= until:
                raise DistNetworkError("the simulated store does not answer")
            scheduler.sleep(min(until, scheduler.now + 0.5))
        slow = 2.0 if server.mode is Mode.SLOW else 0.0
        scheduler.sleep(scheduler.now + server.network.delay(host, server.host) + slow)
        if server.is_gone(number):
            raise DistNetworkError("the simulated store has closed the connection")
        result = act(server.values)
        scheduler.sleep(scheduler.now + server.network.delay(host, server.host) + slow)
        return result


class SimPrefixStore(StoreClient):
    """As a `PrefixStore`."""

    def __init__(self, prefix: str, store: StoreClient) -> None:
        self._prefix = f"{store._prefix}{prefix}/"
        self._connection = store._connection
        self.underlying_store = store
