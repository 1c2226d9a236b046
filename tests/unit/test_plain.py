"""A user's subclasses of texts and numbers become plain where they are kept, or sent."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from farcall.ids import WorkerInfo, check_name
from farcall.plain import encode_msgpack, plain_text, whole_number
from farcall.rpc import Retry, RpcBackendOptions
from farcall.runtime.calls.call_checks import check_concurrency
from farcall.serde import Only


class Text(str):
    """Says something else of itself than it is."""

    def __str__(self) -> str:
        return "something else"

    __repr__ = __format__ = __str__  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        raise RuntimeError("this can't be pickled")


class Colour(str, enum.Enum):  # noqa: UP042  # a text of its own in `str`
    RED = "red"


class Count(int):
    def __index__(self) -> int:
        return 99

    __int__ = __index__


class Seconds(float):
    def __float__(self) -> float:
        return 99.0


class Raw(bytes):
    pass


@pytest.mark.parametrize("given", ["red", Text("red"), Colour.RED, np.str_("red")])
def test_a_text_becomes_plain(given: str) -> None:
    assert plain_text(given) == "red"
    assert type(plain_text(given)) is str


@pytest.mark.parametrize(
    "given", [3, Count(3), np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)]
)
def test_a_whole_number_becomes_plain(given: object) -> None:
    assert whole_number("n", given) == 3
    assert type(whole_number("n", given)) is int


@pytest.mark.parametrize(
    "given",
    [None, True, "3", 3.0, np.float64(3), np.array([1, 2]), torch.tensor(3.0), torch.ones(2, 2)],
)
def test_a_value_that_is_no_whole_number_is_refused_by_name(given: object) -> None:
    with pytest.raises(TypeError, match=f"n must be an int, not (a )?{type(given).__name__}"):
        whole_number("n", given)


def test_a_number_that_is_too_low_is_refused_by_name() -> None:
    assert whole_number("n", -7, -7) == -7
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        whole_number("n", np.int64(0), 1)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (Text("a"), "a"),
        (np.str_("a"), "a"),
        (Count(3), 3),
        (Seconds(1.5), 1.5),
        (np.float64(1.5), 1.5),
        (Raw(b"b"), b"b"),
        ([Text("a"), {Text("k"): Count(4)}], ["a", {"k": 4}]),
    ],
)
def test_subclasses_travel_as_plain_values(given: object, plain: object) -> None:
    assert msgspec.msgpack.decode(encode_msgpack(given)) == plain


def test_other_values_do_not_travel() -> None:
    with pytest.raises(TypeError, match="messages have no object"):
        encode_msgpack([object()])


# Options.

NEITHER = {"store", "secret", "tls", "policy", "devices", "device_maps", "unknown"}
GIVEN: dict[str, object] = {
    **{"role": "trainer", "listen": "127.0.0.1:0", "max_threads": 32, "tcp_streams": 2},
}
SUBCLASSES: dict[type, type] = {str: Text, int: Count, float: Seconds}


def _odd(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_odd, value))
    return SUBCLASSES[type(value)](value)


def _options() -> list[tuple[str, Any]]:
    defaults = RpcBackendOptions()
    names = [one for one in inspect.signature(RpcBackendOptions).parameters if one not in NEITHER]
    values = [(name, GIVEN.get(name, getattr(defaults, name))) for name in names]
    return [(name, value) for name, value in values if not isinstance(value, bool)]


@pytest.mark.parametrize(("name", "value"), _options())
def test_options_of_odd_types_are_kept_plain(name: str, value: Any) -> None:
    options = RpcBackendOptions(**{name: _odd(value)})
    kept = getattr(options, name)
    if isinstance(value, float):  # a number of seconds is what it says of itself, as in `float()`
        assert kept == 99.0
    else:
        assert kept == value
    assert type(kept) is type(value)
    if isinstance(value, tuple):
        assert {type(one) for one in kept} == {str}


@pytest.mark.parametrize("name", [name for name, value in _options() if type(value) is int])
def test_options_take_numbers_of_numpy(name: str) -> None:
    options = RpcBackendOptions(**{name: np.int64(8)})
    assert getattr(options, name) == 8
    assert type(getattr(options, name)) is int


def test_names_of_device_maps_and_policies_are_kept_plain() -> None:
    options = RpcBackendOptions(
        device_maps={Text("a"): {"cpu": "cpu"}}, policy={Text("trainer*"): Only()}
    )
    assert isinstance(options.policy, dict)
    assert {type(name) for name in (*options.device_maps, *options.policy)} == {str}


# Names and numbers elsewhere.


def test_the_name_and_id_of_a_worker_are_plain() -> None:
    info = WorkerInfo(Text("a"), Count(3))
    assert (info.name, info.id) == ("a", 3)
    assert (type(info.name), type(info.id)) == (str, int)
    assert type(check_name(np.str_("b"))) is str


def test_counts_are_plain() -> None:
    counts = (
        Retry(Count(3)).times,
        Retry.of(np.int64(3)).times,
        check_concurrency(Count(3)),
        Only(max_objects=np.int64(3)).max_objects,  # type: ignore[arg-type]  # an int of numpy's
    )
    assert counts == (3, 3, 3, 3)
    assert {type(count) for count in counts} == {int}
