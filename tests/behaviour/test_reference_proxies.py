"""The call proxies of references: `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from behaviour.helpers import PROXIES, Account, Gate
from farcall import rpc
from farcall.runtime.agent import Agent

Way = Callable[..., Any]
each_proxy = pytest.mark.parametrize("proxy", PROXIES)


@each_proxy
@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_proxies_call_methods_on_the_owner(pair: list[Agent], proxy: Way, owner: str) -> None:
    rref = rpc.remote(owner, Account, args=(5,))
    assert proxy(rref, "deposit", 1) == 6
    assert proxy(rref, "deposit", amount=1, times=2) == 8
    assert proxy(rref, "where") == owner
    assert proxy(rref, "double", 4) == 8
    assert proxy(rref, "kind") == "Account"
    assert proxy(rref, "__call__", 1) == 9
    assert proxy(rref, "__len__") == 8
    assert proxy(rref, "itself").balance == 8


@each_proxy
def test_proxies_raise_what_the_method_raised(pair: list[Agent], proxy: Way) -> None:
    rref = rpc.remote("w1", Account)
    with pytest.raises(KeyError, match="in the method"):
        proxy(rref, "fail")
    with pytest.raises(AttributeError, match="withdraw"):
        proxy(rref, "withdraw", 5)
    with pytest.raises(TypeError, match="deposit"):
        proxy(rref, "deposit")


@pytest.mark.parametrize("timeout", [60, 0, -1])
def test_proxies_take_timeouts(pair: list[Agent], timeout: float) -> None:
    rref = rpc.remote("w1", Account)
    assert rref.rpc_sync(timeout).deposit(1) == 1
    assert rref.rpc_async(timeout=timeout).deposit(1).wait() == 2
    assert rref.remote(timeout).deposit(1).to_here(timeout) == 3


def test_proxies_time_out(pair: list[Agent], gate: Gate) -> None:
    rref = rpc.remote("w1", Account)
    with pytest.raises(rpc.RpcTimeout):
        rref.rpc_sync(timeout=0.05).wait(gate)
    with pytest.raises(rpc.RpcTimeout):
        rref.rpc_async(timeout=0.05).wait(gate).wait()
    with pytest.raises(rpc.RpcTimeout):
        rref.remote().wait(gate).to_here(timeout=0.05)
    assert rref.rpc_sync().deposit(1) == 1


def test_a_proxy_can_be_used_again_and_again(pair: list[Agent]) -> None:
    proxy = rpc.remote("w1", Account).rpc_sync()
    assert [proxy.deposit(1) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_remote_proxies_chain(trio: list[Agent]) -> None:
    rref = rpc.remote("w1", Account, args=(5,))
    same = rref.remote().itself().remote().itself()
    assert same.owner_name() == "w1"
    same.rpc_sync().deposit(1)
    assert rref.rpc_sync().deposit(0) == 6
