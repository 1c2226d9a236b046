"""The call proxies of references: `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()`."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from behaviour.helpers import PROXIES, Account, Gate
from farcall import rpc
from farcall.errors import SerializationError
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
def test_proxies_raise_the_error_of_the_method(pair: list[Agent], proxy: Way) -> None:
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


# Attributes that are no methods: the proxies call methods only.


class Settings:
    """A value with attributes of every kind that can't be called."""

    kind = "of the class"
    __slots__ = ("cap", "nested", "tensor")

    def __init__(self) -> None:
        self.cap, self.nested, self.tensor = 5, {"a": 1}, torch.ones(2)

    @property
    def half(self) -> float:
        return self.cap / 2


@each_proxy
def test_calling_an_attribute_names_it_and_says_how_to_read_it(
    pair: list[Agent], proxy: Way
) -> None:
    for owner in ("w0", "w1"):
        rref = rpc.remote(owner, Settings)
        for name in ("cap", "kind", "nested", "tensor", "half"):
            with pytest.raises(TypeError, match=f"'{name}' of this Settings is no met") as raised:
                proxy(rref, name)
            assert f"lambda rref: rref.local_value().{name}, args=(rref,)" in str(raised.value)


def test_the_remedy_of_the_error_works(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", Settings)
    read = rpc.rpc_sync(rref.owner(), lambda rref: rref.local_value().cap, args=(rref,))
    assert read == rref.to_here().cap == 5


USES: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "not": operator.not_,
    "int": int,
    "float": float,
    "complex": complex,
    "index": lambda it: [1, 2][it],
    "len": len,
    "list": list,
    "reversed": reversed,
    "in": lambda it: 1 in it,
    "item": lambda it: it[0],
    "put": lambda it: operator.setitem(it, 0, 1),
    "remove": lambda it: operator.delitem(it, 0),
    "next": next,
    "with": lambda it: it.__enter__(),
    "round": round,
    "floor": math.floor,
    "negative": operator.neg,
    "invert": operator.invert,
    "equal": lambda it: it == 5,
    "unequal": lambda it: it != 5,
    "equal on the right": lambda it: 5 == it,  # noqa: SIM300
    "less": lambda it: it < 5,
    "compare on the right": lambda it: 5 <= it,  # noqa: SIM300
    "sum": lambda it: sum([1, it]),
    "add": lambda it: it + 1,
    "add on the right": lambda it: 1 + it,
    "product": lambda it: it * 2.0,
    "tensor": lambda it: torch.ones(2) * it,
    "matmul": lambda it: torch.ones(2) @ it,
    "power": lambda it: 2**it,
    "range": range,
    "set": lambda it: setattr(it, "field", 1),
    "delete": lambda it: delattr(it, "field"),
    "field": lambda it: it.field,
    "method of it": lambda it: it.append(1),
    "pickle": pickle.dumps,
    "argument": lambda it: rpc.rpc_sync("w1", len, args=(it,)),
    "as a tensor": torch.tensor,
}


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_that_is_not_called_is_no_value(pair: list[Agent], way: str) -> None:
    method = getattr(rpc.remote("w1", Settings), way)().cap
    for use in USES.values():
        with pytest.raises((TypeError, AttributeError)) as raised:
            use(method)
        assert "'cap' of a remote value" in str(raised.value)
        assert "rref.to_here().cap" in str(raised.value)


def test_a_method_that_is_not_called_is_as_good_as_any_callable(pair: list[Agent]) -> None:
    proxy = rpc.remote("w1", Account).rpc_sync()
    method, other = proxy.deposit, proxy.itself
    assert callable(method)
    assert "deposit" in repr(method)
    assert str(method) == f"{method}" == repr(method)
    assert copy.copy(method) is method
    assert method in [other, method]
    assert other not in [method, print, None]
    assert {method: 1}[method] == 1
    assert functools.partial(method, 2)() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(method, 1).result() == 3
    assert not hasattr(method, "field")


@each_proxy
def test_special_methods_of_operators_are_called_on_the_owner(
    pair: list[Agent], proxy: Way
) -> None:
    rref = rpc.remote("w1", dict, args=({"a": 1},))
    assert proxy(rref, "__getitem__", "a") == 1
    assert proxy(rref, "__contains__", "b") is False
    assert proxy(rref, "__ior__", {"b": 2}) == {"a": 1, "b": 2}
    proxy(rref, "__delitem__", "a")
    assert proxy(rref, "__len__") == 1


# Attributes that debuggers, numpy, torch, `copy`, `pickle`, `inspect` and mocks ask any object for.
ASKED_OF_ANY_OBJECT = (
    "dict name qualname wrapped signature text_signature func self code closure defaults get set "
    "delete set_name copy deepcopy getinitargs getnewargs getnewargs_ex setstate array "
    "array_interface array_struct array_ufunc array_function array_priority dlpack dlpack_device "
    "cuda_array_interface torch_function torch_dispatch jit_unused_properties prepare mro_entries "
    "class_getitem iscoroutinefunction fields dataclass_fields attrs_attrs struct_fields html "
    "abstractmethods isabstractmethod instancecheck path file spec loader all annotations del"
)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_protocols_of_python_find_no_method_of_the_value(pair: list[Agent], way: str) -> None:
    proxy = getattr(rpc.remote("w1", Settings), way)()
    for name in ASKED_OF_ANY_OBJECT.split():
        special = f"__{name}__"
        if name not in ("copy", "deepcopy"):
            assert not hasattr(proxy, special), special
        assert not isinstance(getattr(proxy, special, None), functools.partial), special
    with pytest.raises(AttributeError, match="'__wrapped__' is not called on the owner"):
        proxy.__wrapped__  # noqa: B018


def test_tools_of_python_can_look_at_a_proxy(pair: list[Agent]) -> None:
    proxy = rpc.remote("w1", Account).rpc_sync()
    assert not inspect.isabstract(proxy)
    assert inspect.unwrap(proxy) is proxy
    assert copy.copy(proxy) is copy.deepcopy(proxy) is proxy
    assert "deposit" not in dir(proxy)
    assert mock.create_autospec(proxy, instance=True) is not None
    with pytest.raises((TypeError, RuntimeError)):
        torch.tensor(proxy)
    assert copy.deepcopy({"kept": proxy})["kept"].deposit(1) == 1


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_a_proxy_cannot_be_sent_and_says_what_can(pair: list[Agent], way: str) -> None:
    proxy = getattr(rpc.remote("w1", Account), way)()
    says = r"a call proxy \(rref\.\w+\(\)\) can't be sent or pickled: send the reference"
    with pytest.raises(TypeError, match=says):
        pickle.dumps(proxy)
    for send in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(SerializationError, match=says):
            send("w1", id, args=([proxy],))
