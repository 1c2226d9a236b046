"""Workers that start at a store of a liar's, and call each other: errors in time, or right values.

The agents of a test are in one process, and each has a view of the store of its own.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from known_secrets import SECRET
from patience import PATIENCE
from torch.distributed import HashStore, Store

from farcall.autograd.autograd import Autograd
from farcall.errors import FarcallError, RendezvousError, RendezvousTimeout, UnknownWorker
from farcall.runtime import start
from farcall.runtime.agent import Agent
from farcall.runtime.membership import fixed_group
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.quirks import Quirks
from farcall.runtime.start import start_agent

SHORT = 0.3


class View(Store):
    """A store as one worker sees it.

    Args:
        below: the store that all have.
        alter: gets a key and what it holds, and returns what the worker is shown.
    """

    def __init__(self, below: Store, alter: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self._below = below
        self._alter = alter

    def set(self, key: str, value: Any) -> None:
        self._below.set(key, value)

    def get(self, key: str) -> bytes:
        return self._alter(key, self._below.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._below.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._below.check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._alter(key, self._below.compare_set(key, expected, desired))

    def set_timeout(self, _: Any) -> None:
        pass


class Workers:
    """Agents that are closed at the end."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []

    def start(self, name: str, rank: int, size: int | None, store: Store, **options: Any) -> Agent:
        options = {"rpc_timeout": PATIENCE, "secret": SECRET, "listen": "127.0.0.1", **options}
        # Else a worker without a secret would take this machine's.
        options.setdefault("insecure", options["secret"] is None)
        made = RpcBackendOptions(store=store, transports=["socket"], **options)
        agent = start_agent(name, rank, size, made, Credentials(), 0, Quirks(), Autograd)
        self.agents.append(agent)
        return agent

    def start_all(
        self, size: int | None, *stores: Store, **options: Any
    ) -> list[Agent | FarcallError]:
        outcomes: dict[int, Agent | FarcallError] = {}

        def run(rank: int) -> None:
            try:
                outcomes[rank] = self.start(f"w{rank}", rank, size, stores[rank])
            except FarcallError as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return [outcomes[rank] for rank in range(len(stores))]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    for agent in workers.agents:
        agent.close()


def unaltered(key: str, value: bytes) -> bytes:
    return value


def to_a_liar(key: str, value: bytes) -> bytes:
    """Lead each address of another worker elsewhere. It keeps its length, so all else is right."""
    return (
        value if key.endswith(("w0", "/0")) else value.replace(b"tcp://127.0.0.", b"tcp://127.9.9.")
    )


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_group, "CLAIM_SECONDS", SHORT)


def test_workers_meet_and_call_each_other(workers: Workers) -> None:
    store = HashStore()
    w0, w1 = workers.start_all(2, View(store, unaltered), View(store, unaltered))
    assert isinstance(w0, Agent)
    assert isinstance(w1, Agent)
    assert w0.call("w1", operator.add, (1, 2)) == w1.call("w0", operator.add, (1, 2)) == 3


def test_an_address_that_is_changed_makes_no_group(workers: Workers) -> None:
    store = HashStore()
    outcomes = workers.start_all(2, View(store, to_a_liar), store)
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError)
        assert "rank 1 can't be believed" in str(outcome)


def test_an_address_that_is_changed_is_not_called(workers: Workers) -> None:
    store = HashStore()
    w0 = workers.start("w0", 0, None, View(store, to_a_liar))
    workers.start("w1", 1, None, store)
    with pytest.raises(UnknownWorker):
        w0.call("w1", operator.add, (1, 2))


def test_calls_to_one_of_two_workers_that_are_swapped_reach_neither_or_the_right_one(
    workers: Workers,
) -> None:
    store = HashStore()

    def swap(key: str, value: bytes) -> bytes:
        other = {"1": "2", "2": "1"}.get(key[-1])
        if other is None or ("/w" not in key and "rank" not in key):
            return value
        return bytes(store.get(key[:-1] + other)) if store.check([key[:-1] + other]) else value

    for rank in (1, 2):
        workers.start(f"w{rank}", rank, None, store)
    w0 = workers.start("w0", 0, None, View(store, swap))
    for to in ("w1", "w2", 1, 2):
        with pytest.raises(UnknownWorker):
            w0.call(to, operator.add, (1, 2))
    honest = workers.start("w3", 3, None, store)
    assert honest.call("w1", operator.add, (1, 2)) == 3


def test_workers_of_two_groups_with_one_secret_do_not_mix(workers: Workers) -> None:
    """Use one secret for two groups, as one's own programs do unless it is set."""
    one, other = HashStore(), HashStore()
    w0 = workers.start("w0", 0, None, one)
    stranger = workers.start("w1", 1, None, other)
    for key in ("name/w1", "rank/1"):
        one.set(f"farcall/open/{key}", other.get(f"farcall/open/{key}"))
    with pytest.raises(UnknownWorker):
        w0.call("w1", operator.add, (1, 2))
    assert stranger.directory.known("w0") is None


@pytest.mark.parametrize("size", [None, 2])
def test_a_store_that_never_answers_is_waited_for_in_time(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    monkeypatch.setattr(start, "LATE_SECONDS", SHORT)
    never = threading.Event()

    def wait(key: str, value: bytes) -> bytes:
        never.wait(PATIENCE)
        return value

    with pytest.raises(RendezvousTimeout, match="the store does not answer"):
        workers.start("w0", 0, size, View(HashStore(), wait), rpc_timeout=SHORT)
    never.set()


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("size", [None, 1])
def test_junk_where_groups_of_fixed_size_leave_their_mark(
    workers: Workers, size: int | None, secret: str | None
) -> None:
    store = HashStore()
    store.set("farcall/fixed", "{junk")
    assert workers.start("w0", 0, size, store, secret=secret).call("w0", operator.add, (1, 2)) == 3


@pytest.mark.parametrize("secret", [None, SECRET])
def test_addresses_that_are_none_raise_the_errors_of_calls(
    workers: Workers, secret: str | None
) -> None:
    """Write any address, as a member may do, and without a secret everyone."""
    w0 = workers.start("w0", 0, None, HashStore(), secret=secret)
    for url in ("tcp://[::1", "tcp://x:99999", "tcp://\N{BULLET}:1", "unix:@", "", "tcp://:0"):
        mine = w0.me
        w0.directory.add(type(mine)("w9", 9, 2**40 + len(url), (url,), "elsewhere"))
        with pytest.raises(FarcallError):
            w0.call("w9", operator.add, (1, 2), timeout=SHORT)
