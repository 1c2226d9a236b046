"""An exception arrives as it left, with its causes, and shows the user's frames only."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import WAYS, Gate, in_threads, wait_until
from farcall import autograd, nn, rpc
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.serde import RemoteTraceback
from farcall.testing.cluster import acting_as

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


class WithSlots(Exception):
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: int, hidden: int) -> None:
        super().__init__("slots")
        self.shown = shown
        self.__hidden = hidden

    @property
    def hidden(self) -> int:
        return self.__hidden


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenWithSlots(Exception):
    shown: int
    hidden: int


class TupleState(Exception):
    def __getstate__(self) -> Any:
        return self.shown, self.hidden  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self.shown, self.hidden = state


class OwnReduction(Exception):
    def __reduce__(self) -> Any:
        return OwnReduction, ("reduced",)


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("can't be reduced")


def changed(error: BaseException, **attributes: Any) -> BaseException:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


# The function that raises, and the attributes that must be equal on arrival.
ERRORS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "AttributeError": (lambda: (3).nothing, ("name", "obj")),  # type: ignore[attr-defined]
    "NameError": (lambda: nothing, ("name",)),  # type: ignore[name-defined]  # noqa: F821
    "ImportError": (lambda: __import__("farcall.nothing"), ("name", "path")),
    "SyntaxError": (
        lambda: compile("a b", "f.py", "exec"),
        ("filename", "lineno", "offset", "text", "end_lineno", "end_offset", "msg"),
    ),
    "UnicodeError": (b"\xff".decode, ("encoding", "object", "start", "end", "reason")),
    "OSError": (lambda: torch.load("/no/such"), ("errno", "strerror", "filename", "args")),
    "OSError, changed": (
        lambda: raise_(changed(OSError(2, "gone", "name"), errno=5, filename2="other")),
        ("errno", "filename", "filename2"),
    ),
    "BlockingIOError": (lambda: raise_(BlockingIOError(11, "busy", 7)), ("characters_written",)),
    "StopIteration": (lambda: raise_(StopIteration(5)), ("value",)),
    "StopIteration, changed": (lambda: raise_(changed(StopIteration(5), value=6)), ("value",)),
    "slots": (lambda: raise_(WithSlots(1, 2)), ("shown", "hidden")),
    "frozen with slots": (lambda: raise_(FrozenWithSlots(1, 2)), ("shown", "hidden")),
    "frozen with slots, two hops": (
        lambda: rpc.rpc_sync("w0", raise_, args=(FrozenWithSlots(1, 2),)),
        ("shown", "hidden"),
    ),
    "tuple as state": (
        lambda: raise_(changed(TupleState("x"), shown=1, hidden=2)),
        ("shown", "hidden", "args"),
    ),
    "tuple as state, unset": (lambda: raise_(TupleState("x")), ("args",)),
    "notes": (lambda: raise_(with_note(ValueError("x"))), ("__notes__",)),
    "notes of an own reduction": (lambda: raise_(with_note(OwnReduction())), ("__notes__",)),
}


def raise_(error: BaseException) -> None:
    raise error


def with_note(error: BaseException) -> BaseException:
    error.add_note("a note")
    return error


def raise_named(name: str) -> None:
    ERRORS[name][0]()


@each_way
@pytest.mark.parametrize("name", ERRORS)
def test_every_field_arrives(pair: list[Agent], call: Way, name: str) -> None:
    with pytest.raises(Exception) as local:
        raise_named(name)
    with pytest.raises(type(local.value)) as raised:
        call("w1", raise_named, (name,))
    for field in ERRORS[name][1]:
        assert getattr(raised.value, field) == getattr(local.value, field), field


def raise_chained(kind: str) -> None:
    try:
        raise_innermost(kind)
    except Exception as error:
        if kind == "context":
            raise ValueError("outer") from None if kind == "none" else ValueError("outer")
        if kind == "hidden":
            raise ValueError("outer") from None
        raise ValueError("outer") from error


def raise_innermost(kind: str) -> None:
    raise Unsendable("inner") if kind == "unsendable" else with_note(KeyError("inner"))


@each_way
def test_a_cause_arrives_as_itself_with_its_frames(pair: list[Agent], call: Way) -> None:
    with pytest.raises(ValueError, match="outer") as raised:
        call("w1", raise_chained, ("cause",))
    cause = raised.value.__cause__
    assert type(cause) is KeyError
    assert cause.args == ("inner",)
    assert cause.__notes__ == ["a note"]
    assert names(cause)[-2:] == ["raise_chained", "raise_innermost"]
    assert isinstance(cause.__cause__, RemoteTraceback)  # says which worker it was
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("in raise_innermost") == 1
    assert "on worker 'w1'" in text


@each_way
def test_the_error_that_was_being_handled_arrives(pair: list[Agent], call: Way) -> None:
    with pytest.raises(ValueError, match="outer") as raised:
        call("w1", raise_in_handler)
    assert raised.value.__cause__ is None
    assert type(raised.value.__context__) is KeyError
    assert not raised.value.__suppress_context__


def raise_in_handler() -> None:
    try:
        raise KeyError("inner")
    except KeyError:
        raise ValueError("outer")  # noqa: B904


@each_way
def test_a_hidden_cause_stays_hidden(pair: list[Agent], call: Way) -> None:
    with pytest.raises(ValueError, match="outer") as raised:
        call("w1", raise_chained, ("hidden",))
    assert "inner" not in "".join(traceback.format_exception(raised.value))


def test_a_cause_that_can_not_be_sent_is_named(pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="outer") as raised:
        rpc.rpc_sync("w1", raise_chained, args=("unsendable",))
    cause = raised.value.__cause__
    assert type(cause) is rpc.RemoteError
    assert cause.type_name.endswith("Unsendable")
    assert str(cause) == f"{cause.type_name} on worker 'w1': inner"


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# Frames.


class Module(torch.nn.Module):
    def __init__(self, fails: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self) -> None:
        raise_(KeyError("in the module"))


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise_(KeyError("in the step"))


class FailingBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise_(KeyError("backwards"))


def fail_backwards(value: torch.Tensor) -> torch.Tensor:
    return FailingBackwards.apply(value)


def by_backward() -> None:
    with autograd.context() as context:
        value = rpc.rpc_sync("w1", fail_backwards, args=(torch.ones(2, requires_grad=True),))
        autograd.backward(context, [value.sum()])


def by_step() -> None:
    parameter = rpc.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
    optimizer = DistributedOptimizer(FailingOptimizer, [parameter], lr=0.1)
    with autograd.context() as context:
        value = rpc.rpc_sync("w1", total, args=(parameter,))
        autograd.backward(context, [value])
        optimizer.step(context)


def total(parameter: rpc.RRef[Any]) -> torch.Tensor:
    return (parameter.local_value() * 2).sum()


def fail() -> None:
    raise_(KeyError("failed"))


ENTRIES: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w1", fail),
    "rpc_async": lambda: rpc.rpc_async("w1", fail).wait(),
    "value": lambda: rpc.rpc_async("w1", fail).then(lambda done: done.value()).wait(),
    "to_here": lambda: rpc.remote("w1", fail).to_here(),
    "local_value": lambda: rpc.remote("w0", fail).local_value(),
    "to_here of one's own": lambda: rpc.remote("w0", fail).to_here(),
    "proxy": lambda: rpc.remote("w1", Module).rpc_sync().forward(),
    "async proxy": lambda: rpc.remote("w1", Module).rpc_async().forward().wait(),
    "remote proxy": lambda: rpc.remote("w1", Module).remote().forward().to_here(),
    "RemoteModule": lambda: nn.RemoteModule("w1", Module, ()).forward(),
    "backward": by_backward,
    "step": by_step,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("full", [False, True])
def test_tracebacks_show_the_users_frames_of_both_sides(
    pair: list[Agent], entry: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_FULL_TRACEBACKS", "1" if full else "0")
    with pytest.raises(KeyError) as raised:
        ENTRIES[entry]()
    assert names(raised.value)[-1] == "raise_"
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("in raise_\n") == 1 or full
    assert ("/src/farcall/" in shown) is full
    assert ("/src/farcall/" in raised.value.remote_traceback) is full if entry in REMOTE else True


def fail_at(gate: Gate) -> None:
    gate.wait()
    fail()


def test_error_that_a_caller_waits_for_is_shown_once(pair: list[Agent], gate: Gate) -> None:
    """Show the error once, though its answer is made where the function ends and handles it."""
    rref = rpc.remote("w1", fail_at, args=(gate,))
    gate.wait_for_arrivals()

    def ask() -> str:
        with acting_as(pair[0]), pytest.raises(KeyError) as raised:
            rref.to_here()
        return "".join(traceback.format_exception(raised.value))

    with in_threads(ask) as shown:
        slot = pair[1].references.slot_of(rref._handle.ref)
        assert slot is not None
        wait_until(lambda: bool(slot._callbacks))
        gate.open()
    assert shown[0].count("in raise_\n") == 1, shown


REMOTE = ("rpc_sync", "rpc_async", "proxy", "async proxy", "RemoteModule")


@pytest.mark.parametrize(
    "call",
    [
        lambda: rpc.rpc_sync("nobody", fail),
        lambda: rpc.rpc_async("nobody", fail),
        lambda: rpc.remote("nobody", fail),
        lambda: rpc.rpc_sync("w1", "no function"),  # type: ignore[arg-type]
        lambda: rpc.rpc_sync("w1", raise_, args=(iter(()).__next__, lambda: (yield))),
        lambda: rpc.RRef(1).to_here(timeout="soon"),  # type: ignore[arg-type]
    ],
)
def test_an_error_of_a_call_is_shown_where_the_call_is_made(
    pair: list[Agent], call: Callable[[], Any]
) -> None:
    with pytest.raises(Exception) as raised:
        call()
    assert "/src/farcall/" not in "".join(traceback.format_exception(raised.value))


def test_plain_workers_get_causes_of_built_in_types(start: Callable[..., list[Agent]]) -> None:
    start(2, policies={"w0": rpc.Only(), "w1": rpc.Only([raise_chained])})
    with pytest.raises(ValueError, match="outer") as raised:
        rpc.rpc_sync("w1", raise_chained, args=("cause",))
    assert type(raised.value.__cause__) is KeyError
    assert names(raised.value.__cause__)[-1] == "raise_innermost"
