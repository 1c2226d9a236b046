"""Calls whose value never comes are kept as long as a caller waits for them, and no longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, by_async, by_sync, in_threads, wait_until
from behaviour.test_bounded_memory import succeed_often, tables, wait_until_small
from farcall import rpc
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

Call = Callable[[float], Any]  # made with this timeout
async_execution = rpc.functions.async_execution
pytestmark = pytest.mark.parametrize("transport", ["native", "inproc"])
FUTURES: list[torch.futures.Future[Any]] = []  # the user keeps them all


def new_future() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    FUTURES.append(future)
    return future


@async_execution
def never(*_: Any) -> torch.futures.Future[Any]:
    return new_future()


@async_execution
def dropped(*_: Any) -> torch.futures.Future[Any]:
    return torch.futures.Future()


class Never:
    @staticmethod
    @async_execution
    def static() -> torch.futures.Future[Any]:
        return new_future()

    @classmethod
    @async_execution
    def of_class(cls) -> torch.futures.Future[Any]:
        return new_future()

    @async_execution
    def method(self) -> torch.futures.Future[Any]:
        return new_future()

    def plain(self) -> None: ...


by_value = async_execution(lambda: new_future())  # noqa: PLW0108  # it is to have no name
FUNCTIONS = {
    "function": never,
    "dropped": dropped,
    "static method": Never.static,
    "class method": Never.of_class,
    "bound method": Never().method,
    "by value": by_value,
}


def waiting_for_value(to: str, use: Callable[[RRef[Any], float], Any]) -> Call:
    unmade = rpc.remote(to, never)
    return lambda timeout: use(unmade, timeout)


def kinds(to: str) -> dict[str, Callable[[], Call]]:
    """Makes calls to a worker that end by their timeout only."""
    found: dict[str, Callable[[], Call]] = {}
    for name, function in FUNCTIONS.items():
        for way in (by_sync, by_async):
            found[f"{name}, {way.__name__}"] = lambda way=way, function=function: (
                lambda timeout: way(to, function, timeout=timeout)
            )
    found["remote"] = lambda: lambda timeout: rpc.remote(to, never).to_here(timeout)
    found["remote of a method"] = lambda: functools.partial(
        lambda rref, timeout: rref.remote().method().to_here(timeout), rpc.remote(to, Never)
    )
    found["proxy"] = lambda: functools.partial(
        lambda rref, timeout: rref.rpc_sync(timeout).method(), rpc.remote(to, Never)
    )
    uses: dict[str, Callable[[RRef[Any], float], Any]] = {
        "to_here": lambda rref, timeout: rref.to_here(timeout),
        "type": lambda rref, timeout: rref._get_type(timeout),
        "method of an unmade object": lambda rref, timeout: rref.rpc_sync(timeout).plain(),
    }
    for name, use in uses.items():
        found[name] = functools.partial(waiting_for_value, to, use)
    return found


KINDS = list(kinds(""))


@pytest.mark.parametrize("to", ["w1", "w0"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_end_are_kept_until_their_callers_give_up(
    pair: list[Agent], kind: str, to: str
) -> None:
    call = kinds(to)[kind]()
    for _ in range(40):
        with pytest.raises(rpc.RpcTimeout):
            call(0.002)
    succeed_often(10)
    wait_until_small(*pair)
    for agent in pair:
        for place in list(agent.references._values.values()):
            wait_until(lambda place=place: len(place._callbacks or ()) < 4)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_end_are_kept_until_their_callers_die(trio: list[Agent], kind: str) -> None:
    calls = [kinds("w1")[kind]()]

    def call_forever() -> None:
        with pytest.raises(rpc.Cancelled):
            calls[0](0)

    with in_threads(*[functools.partial(as_worker, trio[0], call_forever)] * 10):
        wait_until(lambda: tables(trio[1])["active"] >= 10)
        trio[0].close()
    calls.clear()
    wait_until(lambda: tables(trio[1])["active"] == 0)
    # The numbers of calls that w0 sent in another order than it gave them stay noted.
    kept = {name for name in tables(trio[1]) if not name.startswith("seen of")}
    wait_until(lambda: all(size <= 3 for name, size in tables(trio[1]).items() if name in kept))


@pytest.mark.parametrize("to", ["w1", "w0"])
@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_waits_for_no_call_that_no_caller_waits_for(
    pair: list[Agent], kind: str, to: str
) -> None:
    call = kinds(to)[kind]()
    for _ in range(3):
        with pytest.raises(rpc.RpcTimeout):
            call(0.01)
    del call
    with in_threads(
        *[functools.partial(agent.shutdown, True, PATIENCE) for agent in pair]
    ) as results:
        pass
    assert results == [None, None]


def as_worker(agent: Agent, function: Callable[[], Any]) -> Any:
    with acting_as(agent):
        return function()
