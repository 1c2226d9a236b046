"""`farcall.actor`, `spawn` and the handles: objects on other workers that are used as if here."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import pydoc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farcall
from behaviour.helpers import Deaths, Gate, make_precious
from farcall import rpc
from farcall.errors import Refused
from farcall.runtime.agent import Agent
from farcall.runtime.inspection.looking import received


@farcall.actor
class Buffer:
    def __init__(self, size: int, deaths: Deaths | None = None) -> None:
        self.size = size
        self.items: list[int] = []
        self.precious = None if deaths is None else make_precious(deaths)

    def put(self, item: int) -> int:
        self.items.append(item)
        return len(self.items)

    def sample(self, count: int, *, start: int = 0) -> list[int]:
        """Return items."""
        return self.items[start : start + count]

    def wait(self, gate: Gate) -> int:
        return gate.wait()

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    @classmethod
    def named(cls, name: str) -> str:
        return name

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]

    def __setitem__(self, index: int, item: int) -> None:
        self.items[index] = item

    def __delitem__(self, index: int) -> None:
        del self.items[index]

    def __contains__(self, item: int) -> bool:
        return item in self.items


class Keywords:
    def give(this, **keywords: int) -> dict[str, int]:  # noqa: N805  # `self` is a keyword, too
        return keywords


class Oddity:
    """A class that has special methods which handles and call proxies have themselves."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, name: str) -> str:
        self.calls.append(name)
        return f"{name} of the object"

    def __repr__(self) -> str:
        return self.note("__repr__")

    def __str__(self) -> str:
        return self.note("__str__")

    def __len__(self) -> int:
        return len(self.note("__len__"))

    def __iter__(self) -> Any:
        return self.note("__iter__")

    def __getitem__(self, key: object) -> str:
        return self.note("__getitem__")

    def __contains__(self, key: object) -> Any:
        return self.note("__contains__")

    def __bool__(self) -> Any:
        return self.note("__bool__")

    def __dir__(self) -> Any:
        return self.note("__dir__")

    def __format__(self, form: str) -> str:
        return self.note("__format__")

    def __sizeof__(self) -> Any:
        return self.note("__sizeof__")

    def __call__(self, number: int) -> str:
        return self.note("__call__")

    def __copy__(self) -> Any:
        return self.note("__copy__")

    def __deepcopy__(self, memo: object) -> Any:
        return self.note("__deepcopy__")

    def __await__(self) -> Any:
        return self.note("__await__")

    def __array__(self) -> Any:
        return self.note("__array__")

    def _hidden(self) -> str:
        return self.note("_hidden")


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("__getitem__", "__contains__", "__call__", "__deepcopy__"), (1,)),
    "__format__": ("",),
}
OF_THE_CLASS = [name for name in vars(Oddity) if callable(getattr(Oddity, name))]


@farcall.actor(concurrency=2)
class Pair:
    def wait(self, gate: Gate) -> int:
        return gate.wait()


def use(buffer: farcall.Handle[Buffer]) -> farcall.Handle[Buffer]:
    assert type(buffer) is farcall.Handle
    buffer.put.sync(7)
    return buffer


def test_methods_are_futures_and_attributes_are_read(pair: list[Agent]) -> None:
    buffer = farcall.spawn("w1", Buffer, 100)
    assert [buffer.put(n).wait() for n in range(3)] == [1, 2, 3]
    assert buffer.sample.sync(2, start=1) == [1, 2]
    assert buffer.size.get() == 100

    async def main() -> tuple[Any, ...]:
        return await buffer.size, await buffer.sample(1)

    assert asyncio.run(main()) == (100, [0])
    assert buffer.call(Buffer.sample, 2).wait() == [0, 1]


def test_statements_and_builtins_work_where_the_class_has_them(pair: list[Agent]) -> None:
    buffer = farcall.spawn("w1", Buffer, 100)
    assert buffer  # empty, but a handle
    for number in range(3):
        buffer.put.sync(number)
    buffer[1] = 5
    del buffer[0]
    assert (len(buffer), list(buffer), buffer[-1], 5 in buffer, 9 in buffer) == (
        2,
        [5, 2],
        2,
        True,
        False,
    )
    with pytest.raises(IndexError):
        buffer[5]
    plain = farcall.spawn("w1", Pair)
    with pytest.raises(TypeError, match="has no len"):
        len(plain)
    with pytest.raises(TypeError, match="not iterable"):
        list(plain)


@pytest.mark.parametrize("name", [n for n in OF_THE_CLASS if n not in ("__init__", "note")])
def test_call_of_any_function_of_the_class_is_made_on_the_owner(
    pair: list[Agent], name: str
) -> None:
    handle = farcall.spawn("w1", Oddity)
    result = handle.call(getattr(Oddity, name), *ARGUMENTS.get(name, ())).wait()
    assert str(result) in (f"{name} of the object", str(len(f"{name} of the object")))
    assert handle.calls.get() == [name]


SLOTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("__repr__", "__str__", "__hash__", "__sizeof__", "__dir__", "__reduce__"), ()),
    **dict.fromkeys(("__eq__", "__ne__"), (5,)),
    "__reduce_ex__": (2,),
    "__format__": ("",),
    "__getattribute__": ("size",),
}


@pytest.mark.parametrize("name", SLOTS)
def test_call_of_a_slot_wrapper_is_made_on_the_owner(pair: list[Agent], name: str) -> None:
    buffer = farcall.spawn("w1", Buffer, 100)
    assert buffer.put.sync(1) == 1
    before = received(pair[1])
    buffer.call(getattr(Buffer, name), *SLOTS[name]).wait()
    assert received(pair[1]) == before + 1


def test_handle_travels_and_keeps_the_object(trio: list[Agent]) -> None:
    deaths = Deaths()
    buffer = farcall.spawn("w1", Buffer, 1, deaths, name="replay")
    back = rpc.rpc_sync("w2", use, args=(buffer,))
    assert type(back) is farcall.Handle
    del buffer
    gc.collect()
    assert list(back) == [7]
    named = farcall.handle(rpc.get_object("replay"))
    assert named.put.sync(8) == 2
    del back
    gc.collect()
    assert not deaths.count
    rpc.kill(named)
    with pytest.raises(rpc.Cancelled, match="was killed by w0"):
        named.put.sync(1)
    deaths.wait_for()


def test_one_call_at_a_time_unless_the_class_or_the_caller_says_otherwise(
    pair: list[Agent], gate: Gate
) -> None:
    one = farcall.spawn("w1", Buffer, 1)
    two = farcall.spawn("w1", Pair)
    three = farcall.spawn("w1", Buffer, 1, concurrency=3)
    calls = [handle.wait(gate) for handle in (one, two, three) for _ in range(4)]
    gate.wait_for_arrivals(6)
    gate.open()
    for call in calls:
        call.wait()
    assert gate.most_inside == 6


def test_handle_does_not_pretend_to_be_another_kind_of_object(pair: list[Agent]) -> None:
    buffer = farcall.spawn("w1", Buffer, 1)
    assert not hasattr(buffer, "_repr_html_")
    assert not hasattr(buffer, "getdoc")  # IPython calls it, if it is there
    assert not hasattr(buffer, "__array__")
    assert "put" in repr(buffer.put)
    assert "w1" in repr(buffer)
    with pytest.raises(AttributeError):
        buffer.missing.get()
    with pytest.raises(farcall.errors.InvalidReference):
        pickle.dumps(buffer)


def test_a_member_that_is_neither_called_nor_read_says_how(pair: list[Agent]) -> None:
    buffer = farcall.spawn("w1", Buffer, 1)
    with pytest.raises(AttributeError, match=r"'remote' is asked of 'put'.* handle\.put\.sync\("):
        buffer.put.remote(1)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"'size' of a handle.* handle\.size\.get\(\)"):
        assert buffer.size + 1
    with pytest.raises(TypeError, match=r"'size' of a handle.* handle\.size\.get\(\)"):
        assert buffer.size


def test_dir_signature_and_help_are_those_of_the_object(trio: list[Agent]) -> None:
    spawned = farcall.spawn("w1", Buffer, 1, name="replay")
    spawned.put.sync(1)
    found = farcall.handle(rpc.get_object("replay"))
    for buffer in (spawned, found):
        names = dir(buffer)
        assert {"put", "sample", "size", "items", "owner", "call", "__len__"} <= set(names)
        signature = inspect.signature(buffer.sample)
        assert list(signature.parameters) == ["count", "start"]
        text = pydoc.plain(pydoc.render_doc(buffer.sample))
        assert "sample(count: 'int', *, start: 'int' = 0) -> 'list[int]'" in text
        assert "Return items." in text
        assert list(inspect.signature(buffer.twice).parameters) == ["number"]
        assert list(inspect.signature(buffer.named).parameters) == ["name"]


def test_dir_waits_neither_for_a_turn_nor_for_the_dead(pair: list[Agent], gate: Gate) -> None:
    busy = farcall.spawn("w1", Buffer, 1, name="busy")
    call = busy.wait(gate)
    gate.wait_for_arrivals(1)
    assert "put" in dir(farcall.handle(rpc.get_object("busy")))
    gate.open()
    call.wait()
    rpc.kill(busy)
    assert {"put", "owner"} <= set(dir(busy))


def test_member_learns_the_class_alone_of_a_handle_under_a_policy(
    start: Callable[..., list[Agent]],
) -> None:
    start(2, policies={"w1": rpc.Only(functions=[Buffer])})
    buffer = farcall.spawn("w1", Buffer, 3)
    assert "put" in dir(buffer)
    assert "items" not in dir(buffer)


def test_policy_lists_methods_and_attributes(start: Callable[..., list[Agent]]) -> None:
    listed = [Buffer, Buffer.put, Buffer.__len__, f"{__name__}:Buffer.size"]
    start(2, policies={"w1": rpc.Only(functions=listed)})
    buffer = farcall.spawn("w1", Buffer, 3)
    assert (buffer.put.sync(1), len(buffer), buffer.size.get()) == (1, 1, 3)
    for forbidden in (lambda: buffer[0], buffer.items.get, lambda: list(buffer)):
        with pytest.raises(Refused):
            forbidden()


def test_keywords_of_any_name_reach_the_method(pair: list[Agent]) -> None:
    of_call = {"to": 1, "func": 2, "args": 3, "kwargs": 4, "timeout": 5, "retry": 6}
    keywords = {"self": 7, "method": 8, "name": 9, "handle": 10, "cls": 11, **of_call}
    handle, rref = farcall.spawn("w1", Keywords), rpc.remote("w1", Keywords)
    given = [
        handle.give(**keywords).wait(),
        handle.give.sync(**keywords),
        handle.call(Keywords.give, **keywords).wait(),
        rref.rpc_sync().give(**keywords),
        rref.rpc_async().give(**keywords).wait(),
        rref.remote().give(**keywords).to_here(),
    ]
    assert given == [keywords] * len(given)
