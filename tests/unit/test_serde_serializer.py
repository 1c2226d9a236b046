"""The serializer: code by value, policies, references, and errors that name the cause."""

from __future__ import annotations

import abc
import contextlib
import copyreg
import enum
import gc
import pickle
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import FunctionNotFound, InvalidReference, SerializationError
from farcall.serde import Payload, Serializer, load_reference

pytestmark = pytest.mark.usefixtures("halves")

SERIALIZER = Serializer()


def arrive(payload: Payload, serializer: Serializer = SERIALIZER, **options: object) -> object:
    buffers = [bytearray(buffer) for buffer in payload.buffers]
    return serializer.load(payload.body, buffers, **options)  # type: ignore[arg-type]


def travel(value: object, serializer: Serializer = SERIALIZER) -> object:
    return arrive(serializer.dump(value), serializer)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text()
plain_data = st.recursive(
    scalars | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=10,
)


@given(plain_data)
@settings(max_examples=100, deadline=None)
def test_plain_data_travels(value: object) -> None:
    assert travel(value) == value


def test_small_message_costs_few_bytes_and_no_buffers() -> None:
    payload = SERIALIZER.dump((1, 2))
    assert len(payload.body) < 20
    assert not payload.buffers
    assert payload.tensors == ()


def test_body_may_be_any_bytes() -> None:
    body = SERIALIZER.dump([1]).body
    for kind in (bytes, bytearray, memoryview):
        assert SERIALIZER.load(kind(body)) == [1]


# By value ---------------------------------------------------------------------------------------


def test_lambdas_closures_and_local_classes_travel() -> None:
    offset = torch.ones(3)

    class Local:
        def __init__(self) -> None:
            self.value = 4

    assert torch.equal(travel(lambda x: x + offset)(1), torch.full((3,), 2.0))
    assert travel(Local()).value == 4


def test_large_tensor_in_a_closure_goes_out_of_band() -> None:
    large = torch.zeros(10_000)
    payload = SERIALIZER.dump(lambda: large)
    assert [len(buffer) for buffer in payload.buffers] == [40_000]
    assert arrive(payload)().shape == (10_000,)


def fake_main(monkeypatch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    source = "def work(x): return helper(x)\ndef helper(x): return x + 1\nclass Thing: pass\n"
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    if name == "__mp_main__":
        monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_main_goes_by_value_to_a_peer_with_another_main(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = fake_main(monkeypatch, name)
    payload = SERIALIZER.dump((main.work, main.Thing()), by_value=True)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    work, thing = arrive(payload)
    assert work(1) == 2
    assert type(thing).__name__ == "Thing"


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_main_goes_by_name_to_a_peer_with_the_same_main(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = fake_main(monkeypatch, name)
    thing = main.Thing
    payload = SERIALIZER.dump((main.work, lambda: thing))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    work, give_thing = arrive(payload)
    assert work is main.work
    assert give_thing() is main.Thing


def test_spawned_main_is_main_where_nothing_was_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    main = fake_main(monkeypatch, "__mp_main__")
    payload = SERIALIZER.dump(main.work)
    assert b"__mp_main__" in payload.body
    monkeypatch.delitem(sys.modules, "__mp_main__")
    for body in (payload.body, memoryview(payload.body)):
        assert SERIALIZER.load(body) is main.work


class Custom:
    pass


class Exploit:
    def __init__(self, function: object, *args: object) -> None:
        self.parts = (function, args)

    def __reduce__(self) -> object:
        return self.parts


# References -------------------------------------------------------------------------------------


class Handle:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> object:
        raise TypeError("a handle needs its agent")


def test_handles_become_references_of_the_message() -> None:
    checked: list[Handle] = []
    sender = Serializer(reference=Handle, check=checked.append)
    first, second = Handle(1), Handle(2)
    payload = sender.dump([first, {"x": second}, first])
    assert checked == [first, second]
    assert payload.references == [first, second]
    assert arrive(payload, references=["a", "b"]) == ["a", {"x": "b"}, "a"]


def test_handles_become_references_in_values_that_are_copied_too() -> None:
    handle = Handle(1)
    sender = Serializer(reference=Handle, check=lambda handle: None)
    payload = sender.dump((handle, lambda: handle))
    assert payload.references == [handle]
    got, function = arrive(payload, references=["a"])
    assert got == function() == "a"


def test_handle_that_must_not_be_sent_ends_the_message() -> None:
    def refuse(handle: Handle) -> None:
        raise InvalidReference("not this one")

    sender = Serializer(reference=Handle, check=refuse)
    with pytest.raises(InvalidReference, match="not this one"):
        sender.dump([Handle(1)])
    assert sender.dump([1]).references == ()


@pytest.mark.parametrize("fails", [False, True])
def test_serializer_keeps_nothing_of_a_message(fails: bool) -> None:
    sender = Serializer(reference=Handle, check=lambda handle: None)
    handle = Handle(1)
    tensor = torch.ones(10_000, requires_grad=True)
    gone = [weakref.ref(handle), weakref.ref(tensor)]
    gc.disable()
    try:
        with pytest.raises(SerializationError) if fails else contextlib.nullcontext():
            sender.dump([handle, tensor, LockHolder() if fails else None])
        del handle, tensor
        assert [found() for found in gone] == [None, None]
    finally:
        gc.enable()


def test_dump_inside_a_dump_does_not_mix_with_it() -> None:
    class DumpsInside:
        def __reduce__(self) -> object:
            inner = SERIALIZER.dump([torch.ones(10_000), torch.ones(1, requires_grad=True)])
            assert (len(inner.buffers), len(inner.tensors)) == (1, 1)
            return list, ()

    outer = SERIALIZER.dump([torch.zeros(20_000), DumpsInside(), torch.ones(2, requires_grad=True)])
    assert (len(outer.buffers), len(outer.tensors)) == (1, 1)
    got = arrive(outer)
    assert got[0].shape == (20_000,)
    assert got[1:] == [[], got[2]]


def test_types_registered_with_copyreg_go_their_way() -> None:
    class Registered:
        pass

    copyreg.pickle(Registered, lambda value: (list, ()))
    try:
        assert arrive(SERIALIZER.dump(Registered())) == []
    finally:
        del copyreg.dispatch_table[Registered]
    assert arrive(SERIALIZER.dump(re.compile("a+"))) == re.compile("a+")


def test_classes_with_a_metaclass_go_by_name() -> None:
    assert travel([enum.Enum, abc.ABC]) == [enum.Enum, abc.ABC]


def test_reference_that_the_message_did_not_bring_is_an_error() -> None:
    body = pickle.dumps(Exploit(load_reference, 1))
    for references in ((), ["only one"]):
        with pytest.raises(SerializationError, match="reference 1"):
            SERIALIZER.load(body, references=references)


def test_references_are_gone_after_a_load_that_failed() -> None:
    with pytest.raises(SerializationError):
        SERIALIZER.load(b"garbage", references=["a"])
    with pytest.raises(LookupError):
        load_reference(0)


class LoadsInside:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def __setstate__(self, state: dict[str, bytes]) -> None:
        self.inner = SERIALIZER.load(state["body"])


def test_load_inside_a_load_does_not_mix_with_it() -> None:
    inner = SERIALIZER.dump(torch.ones(1, requires_grad=True)).body
    outer = SERIALIZER.dump([LoadsInside(inner), torch.ones(2, requires_grad=True)])
    arrived: list[torch.Tensor] = []
    got = arrive(outer, attach=lambda leaf: arrived.append(leaf) or leaf)
    assert [id(tensor) for tensor in arrived] == [id(got[1])]
    assert got[0].inner.requires_grad


def test_threads_do_not_see_each_others_references() -> None:
    body = pickle.dumps([Exploit(load_reference, 0) for _ in range(50)])
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda n: SERIALIZER.load(body, references=[n]), range(200))
    assert all(result == [n] * 50 for n, result in enumerate(results))


# Errors -----------------------------------------------------------------------------------------


class Nested:
    class Custom:
        pass


@pytest.fixture
def bare() -> Iterator[types.ModuleType]:
    """Import a module that has no name, and says so in words of its own."""
    module = sys.modules["bare_module"] = types.ModuleType("bare_module")
    code = "def __getattr__(name): raise AttributeError(f'nothing is called {name}')"
    exec(code, vars(module))
    yield module
    del sys.modules["bare_module"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("there", "absent"),
    [
        (b"Custom", b"Absent"),
        (b"Nested", b"Absent"),
        (b"Nested.Custom", b"Nested.Absent"),
        (b"test_serde_serializer", b"gone_serde_serializer"),
        (b"test_serde_serializer", b"test_serde.serializer"),
        (b"\x15test_serde_serializer", b"\x0bbare_module"),
        (b"\x15test_serde_serializer", b"\x05torch"),
    ],
)
def test_missing_attribute_or_module_is_function_not_found(there: bytes, absent: bytes) -> None:
    tried = 0
    for value in (Custom(), Nested(), Nested.Custom(), Custom, Nested.Custom):
        for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):
            # Without the frame, whose length would not be right.
            whole = pickle.dumps(value, protocol)
            body = whole[:2] + whole[11:] if whole[2:3] == pickle.FRAME else whole
            if there not in body:
                continue
            tried += 1
            with pytest.raises(FunctionNotFound, match="importable on the callee"):
                SERIALIZER.load(body.replace(there, absent))
    assert tried


def fail_at(kind: str) -> None:
    """Fail as user code may that looks for something absent itself."""
    if kind == "module":
        torch.no_such_attribute  # noqa: B018
    elif kind == "class":
        Custom.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018
    elif kind == "path":
        pickle.whichmodule.no_such.attribute  # type: ignore[attr-defined]  # noqa: B018
    raise AttributeError(kind)


class FailsThere:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __setstate__(self, state: dict[str, str]) -> None:
        fail_at(state["kind"])


@pytest.mark.parametrize("kind", ["module", "class", "path", "text"])
def test_attribute_error_of_user_code_is_not_called_a_missing_function(kind: str) -> None:
    body = SERIALIZER.dump(FailsThere(kind)).body
    with pytest.raises(SerializationError) as caught:
        SERIALIZER.load(body)
    assert type(caught.value) is SerializationError


class RebuildRaises:
    def __reduce__(self) -> object:
        return getattr, (self.__class__, "no_such_attribute")


@pytest.mark.parametrize("body", [b"", b"garbage", b"\x80\x05", pickle.dumps(RebuildRaises())])
def test_broken_body_is_a_serialization_error_with_its_cause(body: bytes) -> None:
    with pytest.raises(SerializationError) as caught:
        SERIALIZER.load(body)
    assert type(caught.value) is SerializationError
    assert caught.value.__cause__ is not None


def test_body_short_of_buffers_is_a_serialization_error() -> None:
    payload = SERIALIZER.dump(torch.zeros(10_000))
    with pytest.raises(SerializationError):
        SERIALIZER.load(payload.body, [])


class LockHolder:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_unpicklable_value_is_a_serialization_error() -> None:
    with pytest.raises(SerializationError, match=r"cannot pickle '_thread\.lock'") as caught:
        SERIALIZER.dump(LockHolder())
    assert isinstance(caught.value.__cause__, TypeError)


def test_endless_nesting_is_a_serialization_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError):
        SERIALIZER.dump(deep)


def explain(args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    with contextlib.suppress(SerializationError):
        SERIALIZER.dump((args, kwargs))
        raise AssertionError("it could be sent")
    error = SerializationError("together")
    return str(SERIALIZER.explain_unpicklable("mod:fn", args, kwargs, error))


def test_unpicklable_argument_is_named() -> None:
    lock_error = "cannot pickle '_thread.lock' object"
    assert explain((1, LockHolder()), {}) == (
        f"argument 1 (LockHolder) of mod:fn can't be sent: {lock_error}"
    )
    assert explain((1,), {"held": threading.Lock()}) == (
        f"keyword argument 'held' (lock) of mod:fn can't be sent: {lock_error}"
    )


def test_explanation_names_the_call_when_each_argument_alone_can_be_sent() -> None:
    error = SERIALIZER.explain_unpicklable("mod:fn", (1,), {}, ValueError("too much"))
    assert str(error) == "the call of mod:fn can't be sent: too much"
