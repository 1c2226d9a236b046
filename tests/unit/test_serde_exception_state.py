"""An exception arrives with the values that it had, however its class keeps and restores them.

Plain pickle is the measure: whatever it carries arrives equal. State that it does not carry arrives
with the sender's values, or as a `RemoteError`, and never with other values.
"""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farcall.errors import RemoteError
from farcall.serde import Serializer, dump_failure, load_failure

SERIALIZER = Serializer()


class Plain(Exception):
    pass


class OtherInit(Exception):
    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class Slots(Exception):
    __slots__ = ("__c", "a", "b")

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.a, self.b, self.__c = a, b, a + b


class MoreSlots(Slots):
    __slots__ = ("d",)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.d = 4


class BesideSlots(Slots):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.e = 5


@dataclasses.dataclass
class Data(Exception):
    a: int
    b: int = 0


@dataclasses.dataclass(frozen=True)
class FrozenData(Exception):
    a: int
    b: int = 0


@dataclasses.dataclass(slots=True)
class SlotsData(Exception):
    a: int
    b: int = 0


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlotsData(Exception):
    a: int
    b: int = 0


@dataclasses.dataclass(slots=True, frozen=True)
class MoreFrozenSlotsData(FrozenSlotsData):
    d: int = 4


class BesideFrozenSlotsData(FrozenSlotsData):
    def __init__(self, a: int, b: int) -> None:
        FrozenSlotsData.__init__(self, a, b)
        object.__setattr__(self, "e", 5)


class KeywordsFrozenSlotsData(FrozenSlotsData):
    def __init__(self, *, a: int, b: int) -> None:
        FrozenSlotsData.__init__(self, a, b)


class DictState(Exception):
    def __getstate__(self) -> Any:
        return self.__dict__.copy()

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.was_restored = True


class OnlySetState(Exception):
    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.was_restored = True


class OnlyGetState(Exception):
    def __getstate__(self) -> Any:
        return {"a": 100}


class ListState(Exception):
    def __getstate__(self) -> Any:
        return [self.a, self.b]  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self.a, self.b = state


class TupleState(Exception):
    def __getstate__(self) -> Any:
        return self.a, self.b  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self.a, self.b = state


class OtherState(Exception):
    def __getstate__(self) -> Any:
        return {"z": 1}

    def __setstate__(self, state: Any) -> None:
        self.z = state["z"] + 1


class NoState(Exception):
    def __getstate__(self) -> Any:
        raise ValueError("no state")

    def __setstate__(self, state: Any) -> None:
        raise ValueError("no state")


class Reduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        return Reduce, (self.a, self.b)


class ReduceWithState(Exception):
    def __reduce__(self) -> Any:
        return ReduceWithState, self.args, {**self.__dict__, "was_reduced": True}


class ReduceLikePickle(FrozenSlotsData):
    def __reduce__(self) -> Any:
        return super().__reduce__()


class ReduceTupleState(TupleState):
    def __reduce__(self) -> Any:
        return ReduceTupleState, self.args, self.__getstate__()


class ReduceEx(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReduceEx, (self.a, self.b)


class ReduceExLikePickle(OnlySetState):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class ByCopyreg(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b = a, b


copyreg.pickle(ByCopyreg, lambda error: (ByCopyreg, (error.a, error.b)))  # type: ignore[arg-type]


class NewArguments(Exception):
    def __new__(cls, a: int, b: int) -> NewArguments:
        made = super().__new__(cls, a)
        made.b = b
        return made

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)

    def __getnewargs__(self) -> Any:
        return self.args[0], self.b  # type: ignore[attr-defined]


class SlotsOSError(OSError):
    __slots__ = ("code",)

    def __init__(self, path: str, code: int) -> None:
        super().__init__(2, "gone", path)
        self.code = code


class SetStateImportError(ImportError):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.was_restored = True


class Group(ExceptionGroup[Exception]):
    def __new__(cls, errors: list[Exception], code: int) -> Group:
        made = super().__new__(cls, "many", errors)
        made.code = code
        return made

    def __init__(self, errors: list[Exception], code: int) -> None:
        pass


class SlotsGroup(ExceptionGroup[Exception]):
    __slots__ = ("code",)


def with_attributes(error: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        object.__setattr__(error, name, value)
    return error


def looked_at(error: Any) -> Any:
    assert vars(error) == {}  # from now on the instance has an empty `__dict__`
    return error


MAKERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Plain(1, 2),
    "attributes": lambda: with_attributes(Plain(1), a=1, b=2),
    "other __init__": lambda: OtherInit(1, b=2),
    "slots": lambda: Slots(1, 2),
    "more slots": lambda: MoreSlots(1, 2),
    "slots and dict": lambda: BesideSlots(1, 2),
    "data": lambda: Data(1, 2),
    "data by keyword": lambda: Data(a=1, b=2),
    "frozen data": lambda: FrozenData(1, 2),
    "slots data": lambda: SlotsData(1, 2),
    "slots data and dict": lambda: with_attributes(SlotsData(1, 2), e=5),
    "frozen slots data": lambda: FrozenSlotsData(1, 2),
    "frozen slots data by keyword": lambda: FrozenSlotsData(a=1, b=2),
    "frozen slots data and dict": lambda: with_attributes(FrozenSlotsData(1, 2), e=5, f=6),
    "frozen slots data, looked at": lambda: looked_at(FrozenSlotsData(1, 2)),
    "more frozen slots data": lambda: MoreFrozenSlotsData(1, 2, 3),
    "heir of frozen slots data": lambda: BesideFrozenSlotsData(1, 2),
    "heir with keywords": lambda: KeywordsFrozenSlotsData(a=1, b=2),
    "dict state": lambda: with_attributes(DictState(1), a=1, b=2),
    "dict state without any": lambda: DictState(1),
    "only __setstate__": lambda: with_attributes(OnlySetState(1), a=1),
    "only __setstate__ without state": lambda: OnlySetState(1),
    "only __getstate__": lambda: with_attributes(OnlyGetState(1), a=1),
    "list state": lambda: with_attributes(ListState(1), a=1, b=2),
    "list state without any": lambda: ListState(1),
    "tuple state": lambda: with_attributes(TupleState(1), a=1, b=2),
    "other state": lambda: with_attributes(OtherState(1), a=1),
    "other state without any": lambda: OtherState(1),
    "no state": lambda: with_attributes(NoState(1), a=1),
    "no state without any": lambda: NoState(1),
    "reduce": lambda: Reduce(1, 2),
    "reduce with state": lambda: with_attributes(ReduceWithState(1), a=1),
    "reduce like pickle": lambda: ReduceLikePickle(1, 2),
    "reduce with tuple state": lambda: with_attributes(ReduceTupleState(1), a=1, b=2),
    "reduce_ex": lambda: ReduceEx(1, 2),
    "reduce_ex like pickle": lambda: ReduceExLikePickle(1),
    "reduce_ex like pickle with state": lambda: with_attributes(ReduceExLikePickle(1), a=1),
    "copyreg": lambda: ByCopyreg(1, 2),
    "new arguments": lambda: NewArguments(1, 2),
    "OSError with slots": lambda: SlotsOSError("/x", 7),
    "ImportError with a name": lambda: SetStateImportError("x", name="m"),
    "ImportError without": lambda: SetStateImportError("x"),
    "group": lambda: Group([ValueError(1), FrozenSlotsData(1, 2)], 7),
    "group with slots": lambda: with_attributes(SlotsGroup("m", [FrozenSlotsData(1, 2)]), code=7),
}
FROM_FARCALL = {"remote_worker", "remote_traceback"}


def contents(error: BaseException) -> tuple[type, dict[str, Any], list[Any]]:
    """Return all that a user can see of an exception: its type, attributes and arguments."""
    attributes = {
        name: getattr(error, name)
        for base in type(error).__mro__
        for name, member in vars(base).items()
        if type(member).__name__ in ("member_descriptor", "getset_descriptor")
        if not name.startswith("__") and hasattr(error, name)
    }
    attributes.update(vars(error))
    for name in ("args", "exceptions", "remote_worker", "remote_traceback"):
        attributes.pop(name, None)
    members = list(getattr(error, "exceptions", ()))
    args = error.args[:1] if members else error.args
    return type(error), attributes, [*args, *map(contents, members)]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def as_error(error: BaseException) -> BaseException:
    failure, payload = dump_failure(SERIALIZER, raised(error))
    return load_failure(SERIALIZER, failure, payload.body, worker="w1")


def as_stripped_error(error: BaseException) -> BaseException:
    """Return the error with an attribute that can't be sent."""
    return as_error(with_attributes(error, lock=threading.Lock()))


def as_value(error: BaseException) -> BaseException:
    (got,) = SERIALIZER.load(SERIALIZER.dump([error]).body)
    return got


def as_value_by_code(error: BaseException) -> BaseException:
    """Return the error beside something that makes the whole message go by value."""
    got, _ = SERIALIZER.load(SERIALIZER.dump([error, lambda: 0]).body)
    return got


def two_hops(error: BaseException) -> BaseException:
    return as_error(as_error(error))


def three_hops(error: BaseException) -> BaseException:
    return as_error(as_value(as_error(error)))


WAYS = [as_error, as_value, as_value_by_code, two_hops, three_hops]


def by_pickle(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MAKERS)
def test_an_exception_arrives_with_its_values(kind: str, way: Callable[..., Any]) -> None:
    wanted = sent = contents(MAKERS[kind]())
    got = way(MAKERS[kind]())
    carried = by_pickle(MAKERS[kind]())
    if carried is not None and sent[1].items() <= contents(carried)[1].items():
        wanted = contents(carried)  # a `__setstate__` or a reduction may add something
    assert contents(got) == wanted


@pytest.mark.parametrize("kind", ["frozen slots data", "list state", "only __setstate__", "slots"])
def test_an_exception_without_a_value_that_cannot_be_sent_has_its_others(kind: str) -> None:
    got = as_stripped_error(MAKERS[kind]())
    assert type(got) is not RemoteError
    sent = contents(MAKERS[kind]())[1]
    assert sent.items() <= contents(got)[1].items()


@pytest.mark.parametrize("kind", MAKERS)
def test_looking_for_notes_leaves_the_reduction_as_it_was(kind: str) -> None:
    error = MAKERS[kind]()
    before = repr(error.__reduce_ex__(5))
    dump_failure(SERIALIZER, error)
    assert repr(error.__reduce_ex__(5)) == before
