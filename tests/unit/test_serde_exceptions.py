"""Exceptions arrive as themselves, with the remote traceback; and sending them never fails."""

from __future__ import annotations

import builtins
import dataclasses
import pickle
import threading
import traceback

import pytest
import torch

from farcall import errors
from farcall.serde import Only, RemoteTraceback, Serializer, dump_failure, load_failure
from farcall.wire.messages import Failure

SERIALIZER = Serializer()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def travel(error: BaseException, only: Only | None = None) -> BaseException:
    failure, payload = dump_failure(SERIALIZER, raised(error), strict=only is not None)
    buffers = [bytearray(buffer) for buffer in payload.buffers]
    return load_failure(SERIALIZER, failure, payload.body, buffers, worker="w1", only=only)


class TwoArguments(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed with {code}")
        self.name = name
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.name = name


class OddNew(Exception):
    def __new__(cls, first: int, second: int) -> OddNew:
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first + second)


class OwnReduce(Exception):
    def __init__(self, name: str, extra: object = None) -> None:
        super().__init__("fixed text")
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return OwnReduce, (self.name + "!",)


class ReduceRaises(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise SystemExit(3)


class UnloadableReduce(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


class StrRaises(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    name: str
    code: int


class OwnState(Exception):
    def __setstate__(self, state: dict[str, object]) -> None:
        self.restored = sorted(state)


class MyOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "gone", path)


class MyStop(StopIteration):
    pass


class Quit(SystemExit):
    pass


class TimeoutAndRuntime(RuntimeError, TimeoutError):
    pass


class Slotted(Exception):
    __slots__ = ("first", "second")

    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


SIMPLE = {
    "ValueError": ValueError("a", 1),
    "KeyError": KeyError("missing"),
    "no args": ValueError(),
    "two arguments": TwoArguments("job", 7),
    "keyword only": KeywordOnly(name="n"),
    "odd __new__": OddNew(1, 2),
    "OSError": OSError(13, "denied", "/some/file"),
    "FileNotFoundError": FileNotFoundError(2, "gone", "/x"),
    "user OSError": MyOSError("/y"),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    "StopIteration": StopIteration(5),
    "user StopIteration": MyStop(5),
    "ImportError": ImportError("x", name="mod", path="/p"),
    "SyntaxError": SyntaxError("bad", ("file.py", 3, 1, "text")),
    "AttributeError": AttributeError("a", name="a", obj=[1]),
    "NameError": NameError("n", name="n"),
    "slots": Slotted(1, "two"),
    "two bases": TimeoutAndRuntime("late"),
    "RpcTimeout": errors.RpcTimeout("late"),
    "PeerLost": errors.PeerLost("w3", "connection reset"),
    "OwnerDied": errors.OwnerDied("w3", "killed"),
    "Refused": errors.Refused("no"),
    "FunctionNotFound": errors.FunctionNotFound("a:b"),
    "torch": torch.OutOfMemoryError("oom"),
    "tensor in args": ValueError(torch.ones(3).tolist()),
}
FIELDS = ("errno", "strerror", "filename", "start", "reason", "object", "value", "code", "name")
FIELDS += ("path", "lineno", "text", "worker", "cause", "obj", "first", "second")


@pytest.mark.parametrize("error", SIMPLE.values(), ids=SIMPLE)
def test_type_args_text_and_fields_survive(error: BaseException) -> None:
    got = travel(error)
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)
    for field in FIELDS:
        assert getattr(got, field, None) == getattr(error, field, None), field


def test_traceback_cause_and_worker_are_attached() -> None:
    def inner_function() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError) as caught:
        inner_function()
    failure, payload = dump_failure(SERIALIZER, caught.value)
    assert (failure.type_name, failure.message) == ("ValueError", "second")
    got = load_failure(SERIALIZER, failure, payload.body, worker="w1")
    assert type(got.__cause__) is KeyError
    assert isinstance(got.__cause__.__cause__, RemoteTraceback)
    assert "inner_function" in got.remote_traceback
    assert "KeyError: 'first'" in got.remote_traceback
    assert got.remote_worker == "w1"
    shown = "".join(traceback.format_exception(got))
    assert "inner_function" in shown
    assert "on worker 'w1'" in shown


@pytest.mark.parametrize("error", [SystemExit(3), Quit(4), KeyboardInterrupt(), GeneratorExit()])
def test_a_value_that_is_no_exception_arrives_as_a_remote_error(error: BaseException) -> None:
    got = travel(error)
    assert type(got) is errors.RemoteError
    assert got.type_name.endswith(type(error).__name__)


def test_the_traceback_has_the_remote_frames_and_none_of_farcall() -> None:
    got = travel(ValueError("x"))
    frames = traceback.extract_tb(got.__traceback__)
    assert [(frame.filename, frame.name) for frame in frames] == [(__file__, "raised")]
    shown = "".join(traceback.format_exception(got))
    assert shown.count("raise error") == 1


def test_remote_frames_keep_no_frames_of_this_process() -> None:
    for _ in range(2):
        trace = travel(ValueError("x")).__traceback__
        assert trace is not None
        frame = trace.tb_frame.f_back
        while frame is not None:
            assert frame.f_code.co_name not in ("travel", "load_failure"), frame
            frame = frame.f_back


def test_an_endless_recursion_keeps_both_ends_of_its_traceback() -> None:
    def recurse() -> None:
        recurse()

    try:
        recurse()
    except RecursionError as error:
        failure, payload = dump_failure(SERIALIZER, error)
    got = load_failure(SERIALIZER, failure, payload.body, worker="w1")
    frames = traceback.extract_tb(got.__traceback__)
    assert len(frames) == 100
    assert frames[0].name.startswith("test_an_endless")


@pytest.mark.parametrize(
    "frames", [((1, 2, 3),), (("a\0b", "f", 1),), (("a", "f", 1 << 62),), (("a", "f", -1),), (1,)]
)
def test_frames_of_a_hostile_peer_do_no_harm(frames: tuple[object, ...]) -> None:
    failure = Failure("mod.Type", "text", "the traceback", frames=frames)
    got = load_failure(SERIALIZER, failure, b"", worker="w1")
    assert str(got) == "mod.Type on worker 'w1': text"


def test_a_missing_attribute_does_not_take_a_large_object_along() -> None:
    got = travel(AttributeError("a", name="a", obj=torch.zeros(100_000)))
    assert (got.name, got.obj) == ("a", None)


def test_it_can_be_raised_twice() -> None:
    got = travel(TwoArguments("a", 1))
    for _ in range(2):
        with pytest.raises(TwoArguments) as caught:
            raise got
        assert caught.value is got
        assert isinstance(got.__cause__, RemoteTraceback)


def test_attributes_and_notes_survive() -> None:
    error = ValueError("x")
    error.detail = {"rows": torch.ones(2)}
    error.__notes__ = ["remember"]
    got = travel(error)
    assert torch.equal(got.detail["rows"], torch.ones(2))
    assert got.__notes__ == ["remember"]


def test_large_tensor_in_an_exception_goes_out_of_band() -> None:
    _, payload = dump_failure(SERIALIZER, ValueError(torch.zeros(10_000)))
    assert [len(buffer) for buffer in payload.buffers] == [40_000]
    assert travel(ValueError(torch.zeros(10_000))).args[0].shape == (10_000,)


def test_own_reduction_is_honoured() -> None:
    got = travel(OwnReduce("n"))
    assert type(got) is OwnReduce
    assert got.name == "n!"


def test_unpicklable_attributes_are_dropped_one_by_one() -> None:
    error = TwoArguments("a", 1)
    error.lock = threading.Lock()
    got = travel(error)
    assert type(got) is TwoArguments
    assert (got.name, got.code) == ("a", 1)
    assert not hasattr(got, "lock")


def test_unpicklable_args_become_their_repr() -> None:
    lock = threading.Lock()
    got = travel(ValueError("why", lock, [1, lock]))
    assert got.args == ("why", repr(lock), [1, repr(lock)])


def test_exception_defined_locally_travels_by_value() -> None:
    class Local(Exception):
        pass

    got = travel(Local("x"))
    assert type(got).__name__ == "Local"
    assert got.args == ("x",)


def test_exception_groups_survive_even_with_unpicklable_members() -> None:
    group_type = vars(builtins).get("ExceptionGroup")
    if group_type is None:
        return  # Python 3.10 has none
    got = travel(group_type("many", [TwoArguments("a", 1), ValueError(threading.Lock())]))
    assert type(got) is group_type
    assert got.message == "many"
    assert [type(member) for member in got.exceptions] == [TwoArguments, ValueError]
    assert got.exceptions[0].code == 1


@pytest.mark.parametrize("error", [ReduceRaises("x"), UnloadableReduce("x")])
def test_an_error_that_cannot_be_rebuilt_is_a_remote_error(error: BaseException) -> None:
    got = travel(error)
    assert type(got) is errors.RemoteError
    assert got.type_name == f"{__name__}.{type(error).__qualname__}"
    assert (got.message, got.worker) == ("x", "w1")
    assert type(error).__name__ in got.remote_traceback
    assert isinstance(got.__cause__, RemoteTraceback)


def test_type_missing_on_this_side_is_a_remote_error() -> None:
    failure, payload = dump_failure(SERIALIZER, TwoArguments("a", 1))
    body = payload.body.replace(b"TwoArguments", b"NoSuchThings")
    got = load_failure(SERIALIZER, failure, body, worker="w1")
    assert type(got) is errors.RemoteError
    assert got.message == "a failed with 1"


@pytest.mark.parametrize("body", [b"", b"garbage", pickle.dumps(3)])
def test_any_body_gives_an_exception(body: bytes) -> None:
    failure = Failure("mod.Type", "text", "the traceback")
    got = load_failure(SERIALIZER, failure, body, worker="w1")
    assert type(got) is errors.RemoteError
    assert str(got) == "mod.Type on worker 'w1': text"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Cancelled", errors.Cancelled),
        ("RpcTimeout", errors.RpcTimeout),
        ("PeerLost", errors.RemoteError),  # whose text is not all that it has
    ],
)
def test_an_error_that_farcall_sends_as_a_text_alone(name: str, kind: type[Exception]) -> None:
    got = load_failure(SERIALIZER, Failure(f"farcall.errors.{name}", "why", ""), b"", worker="w9")
    assert type(got) is kind
    assert "why" in str(got)
    assert got.remote_worker == "w9"  # type: ignore[attr-defined]


def test_exception_whose_str_raises_still_travels() -> None:
    failure, _ = dump_failure(SERIALIZER, StrRaises("x"))
    assert "ValueError" in failure.message
    assert type(travel(StrRaises("x"))) is StrRaises


def test_frozen_dataclass_exception_arrives_whole() -> None:
    got = travel(Frozen("x", 2))
    assert type(got) is Frozen
    assert (got.name, got.code) == ("x", 2)
    assert isinstance(got.__cause__, RemoteTraceback)
    assert got.remote_worker == "w1"


def test_own_setstate_is_honoured() -> None:
    error = OwnState("x")
    error.detail = 1
    assert travel(error).restored == ["detail"]


def test_text_that_is_not_utf8_can_go_on_the_wire() -> None:
    failure, _ = dump_failure(SERIALIZER, raised(ValueError("caf\udce9")))
    failure.message.encode()
    failure.traceback.encode()
    assert travel(ValueError("caf\udce9")).args == ("caf\udce9",)


def test_two_hops_keep_the_worker_of_origin_and_both_tracebacks() -> None:
    first = travel(TwoArguments("a", 1))
    failure, payload = dump_failure(SERIALIZER, raised(first))
    got = load_failure(SERIALIZER, failure, payload.body, worker="w0")
    assert type(got) is TwoArguments
    assert got.remote_worker == "w1"
    assert "on worker 'w1'" in got.remote_traceback


def test_exceptions_as_plain_values_survive_too() -> None:
    got = SERIALIZER.load(SERIALIZER.dump([TwoArguments("a", 1)]).body)
    assert got[0].code == 1


def test_builtin_and_farcall_exceptions_pass_without_pickle() -> None:
    for error in (KeyError("k"), OSError(2, "gone"), errors.PeerLost("w2", "reset")):
        got = travel(error, Only())
        assert type(got) is type(error)
        assert got.args == error.args
    assert type(travel(TwoArguments("a", 1), Only())) is errors.RemoteError
