"""SystemExit or KeyboardInterrupt, raised while an object is unpickled, ends no program."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patience import PATIENCE

from farcall import autograd, rpc
from farcall.errors import RemoteError, SerializationError
from farcall.runtime.agent import Agent
from farcall.serde import Serializer

EXITS: list[type[BaseException]] = [
    *(SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError),
    type("OwnExit", (BaseException,), {"__module__": __name__}),
]
OwnExit = EXITS[-1]


def exits(raises: type[BaseException]) -> Any:
    raise raises("while it arrived")


class ByReduce:
    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __reduce__(self) -> Any:
        return exits, (self.raises,)


class BySetstate(ByReduce):
    def __reduce__(self) -> Any:
        return BySetstate, (self.raises,), {"x": 1}

    def __setstate__(self, state: Any) -> None:
        raise self.raises("while it arrived")


class BySetattr:
    """Through the attributes of a tensor: `__setitem__` and the like run there, too."""

    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __reduce__(self) -> Any:
        return Refusing, (self.raises,), None, None, iter([("key", 1)])


class Refusing(dict[str, Any]):
    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __setitem__(self, key: str, value: Any) -> None:
        raise self.raises("while it arrived")


class ByNew:
    """Its `__new__` raises."""

    def __new__(cls, raises: type[BaseException] | None = None) -> Any:
        if raises is not None:
            raise raises("while it arrived")
        return super().__new__(cls)


class NewReduced(ByReduce):
    def __reduce__(self) -> Any:
        return ByNew, (self.raises,)


def with_tensor(value: Any) -> Any:
    return {"tensor": torch.ones(20_000), "value": value}


KINDS: list[Callable[[type[BaseException]], Any]] = [ByReduce, BySetstate, BySetattr, NewReduced]


def take(value: Any) -> None:
    raise AssertionError("it arrived")


def give(kind: Callable[..., Any], raises: type[BaseException], large: bool) -> Any:
    return with_tensor(kind(raises)) if large else kind(raises)


class Holder:
    def give(self, *of: Any) -> Any:
        return give(*of)

    def take(self, value: Any) -> None:
        take(value)


def in_context(function: Callable[[], Any]) -> Any:
    with autograd.context():
        return function()


def awaited(make: Callable[[], Any]) -> Any:
    async def wait() -> Any:
        return await make()

    return asyncio.run(wait())


RESULTS: dict[str, Callable[..., Any]] = {
    "sync": lambda *of: rpc.rpc_sync("w1", give, args=of),
    "of oneself": lambda *of: rpc.rpc_sync("w0", give, args=of),
    "async": lambda *of: rpc.rpc_async("w1", give, args=of).wait(),
    "await": lambda *of: awaited(lambda: rpc.rpc_async("w1", give, args=of)),
    "then": lambda *of: rpc.rpc_async("w1", give, args=of).then(lambda done: done.value()).wait(),
    "to_here": lambda *of: rpc.remote("w1", give, args=of).to_here(),
    "proxy": lambda *of: rpc.remote("w1", Holder).rpc_sync().give(*of),
    "proxy async": lambda *of: rpc.remote("w1", Holder).rpc_async().give(*of).wait(),
    "in a context": lambda *of: in_context(lambda: rpc.rpc_sync("w1", give, args=of)),
}
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda it: rpc.rpc_sync("w1", take, args=(it,)),
    "of oneself": lambda it: rpc.rpc_sync("w0", take, args=(it,)),
    "keyword": lambda it: rpc.rpc_sync("w1", take, kwargs={"value": it}),
    "async": lambda it: rpc.rpc_async("w1", take, args=(it,)).wait(),
    "remote": lambda it: rpc.remote("w1", take, args=(it,)).to_here(),
    "remote of oneself": lambda it: rpc.remote("w0", take, args=(it,)).to_here(),
    "proxy": lambda it: rpc.remote("w1", Holder).rpc_sync().take(it),
    "in a context": lambda it: in_context(lambda: rpc.rpc_sync("w1", take, args=(it,))),
}
each_exit = pytest.mark.parametrize("raises", EXITS)
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_exit
@each_kind
def test_of_results(pair: list[Agent], kind: Any, raises: type[BaseException]) -> None:
    for large in (False, True):
        for way in RESULTS.values():
            with pytest.raises(SerializationError, match=raises.__name__):
                way(kind, raises, large)
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@each_exit
@each_kind
def test_of_arguments(pair: list[Agent], kind: Any, raises: type[BaseException]) -> None:
    for large in (False, True):
        for way in ARGUMENTS.values():
            with pytest.raises((SerializationError, RemoteError), match=raises.__name__):
                way(with_tensor(kind(raises)) if large else kind(raises))
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@each_exit
def test_of_tensors_that_an_exception_holds(pair: list[Agent], raises: type[BaseException]) -> None:
    for way in (rpc.rpc_sync, lambda *of, **more: rpc.rpc_async(*of, **more).wait()):
        with pytest.raises((SerializationError, RemoteError)):
            way("w1", fail_holding, args=(raises,))


def fail_holding(raises: type[BaseException]) -> None:
    raise ValueError("with a value", BySetstate(raises))


# Ctrl-C in the main thread is the user's, and reaches the user's code as itself.


class Interrupting:
    """While it arrives, the user presses Ctrl-C."""

    def __reduce__(self) -> Any:
        return press, ()


def press() -> None:
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait(0)  # here at the latest the handler runs


needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need it"
)


@needs_main_thread
def test_a_ctrl_c_while_a_result_arrives_is_a_ctrl_c(pair: list[Agent]) -> None:
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("w1", Interrupting)
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@needs_main_thread
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_under_a_handler_of_the_user_every_interrupt_is_a_ctrl_c(number: signal.Signals) -> None:
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    serializer = Serializer()
    before = signal.signal(number, handler)
    try:
        for value in (Interrupting(), ByReduce(KeyboardInterrupt)):
            body = serializer.dump(value).body
            with pytest.raises(KeyboardInterrupt):
                serializer.load(body)
    finally:
        signal.signal(number, before)


@needs_main_thread
@pytest.mark.parametrize("how", ["loop", "call", "comprehension", "sleep"])
def test_a_ctrl_c_in_any_kind_of_code_is_told_from_a_raise(how: str) -> None:
    body = Serializer().dump(Busy(how)).body
    with pytest.raises(KeyboardInterrupt):
        Serializer().load(body)


class Busy:
    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return be_busy, (self.how,)


def be_busy(how: str) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
    match how:
        case "loop":
            while True:
                pass
        case "call":
            while True:
                sys.getsizeof(how)
        case "comprehension":
            [number + 1 for number in iter(int, 1)]
        case "sleep":
            threading.Event().wait(PATIENCE)
