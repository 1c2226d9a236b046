""" "can't be sent: " is said once, however often what could not be sent was met on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import patient_cluster

from farcall import rpc
from farcall.errors import SerializationError
from farcall.serde import Serializer, reason_of
from farcall.testing.cluster import acting_as

SAYS = "can't be sent: "
serializer = Serializer()


class Inside:
    """To pickle it, what it holds is pickled on its own first, `depth` times."""

    def __init__(self, depth: int, how: str) -> None:
        self.depth = depth
        self.how = how

    def __reduce__(self) -> Any:
        inner = Inside(self.depth - 1, self.how) if self.depth else threading.Lock()
        match self.how:
            case "dump":
                serializer.dump(inner)
            case "call":
                rpc.rpc_sync("w1", id, args=(inner,))
            case "keyword":
                rpc.rpc_sync("w1", id, kwargs={"it": inner})
            case "result":
                rpc.rpc_sync("w1", make, args=(self.depth, self.how))
            case "again":
                try:
                    serializer.dump(inner)
                except SerializationError as error:
                    raise SerializationError(SAYS + str(error)) from None
            case "other":
                try:
                    serializer.dump(inner)
                except SerializationError as error:
                    raise ValueError(SAYS + str(error)) from error
        raise AssertionError("it was sent")


def make(depth: int, how: str) -> Any:
    return Inside(depth - 1, how) if depth else threading.Lock()


def nothing(value: Any = None) -> None:
    pass


HOW = ("dump", "call", "keyword", "result", "again", "other")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_it_is_said_once(depth: int, how: str) -> None:
    with patient_cluster(2) as (w0, _), acting_as(w0):
        ways = [
            lambda: serializer.dump(Inside(depth, how)),
            lambda: rpc.rpc_sync("w1", nothing, args=(Inside(depth, how),)),
            lambda: rpc.rpc_async("w1", nothing, kwargs={"value": Inside(depth, how)}).wait(),
            lambda: rpc.rpc_sync("w1", nothing, args=([Inside(depth, how)],)),
            lambda: rpc.remote("w1", nothing, args=(Inside(depth, how),)),
            lambda: rpc.rpc_sync("w1", Inside, args=(depth, how)),
            lambda: rpc.remote("w1", Inside, args=(depth, how)).to_here(),
        ]
        for way in ways:
            with pytest.raises(SerializationError) as raised:
                way()
            text = str(raised.value)
            assert text.count(SAYS) == 1, text
            assert "cannot pickle '_thread.lock' object" in text


@pytest.mark.parametrize("times", [0, 1, 2, 50])
def test_of_a_text_that_says_it_any_number_of_times(times: int) -> None:
    assert reason_of(ValueError(SAYS * times + "because")) == "because"
    assert reason_of(SerializationError(SAYS * times + "because")) == "because"


def test_an_error_without_a_text_is_named() -> None:
    assert reason_of(SerializationError(SAYS)) == "farcall.errors.SerializationError"
    assert reason_of(KeyError()) == "KeyError"


def test_the_middle_of_a_users_error_text_stays() -> None:
    said = "the mail can't be sent: no address"
    assert reason_of(ValueError(said)) == said


async def later() -> int:
    return 1


def one_by_one() -> Iterator[int]:
    yield 1


@pytest.mark.filterwarnings("ignore:coroutine")  # it never runs
@pytest.mark.parametrize(
    ("function", "remedy"), [(later, "asyncio.run"), (one_by_one, "send a list")]
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_results_that_no_pickler_takes_come_with_a_remedy(
    function: Callable[[], object], remedy: str, is_inside: bool
) -> None:
    called = listed if is_inside else call
    with patient_cluster(2) as workers, acting_as(workers[0]):
        with pytest.raises(SerializationError, match=r"cannot pickle '\w+' object; ") as caught:
            rpc.rpc_sync("w1", called, args=(function,))
        assert str(caught.value).count(remedy) == 1


def call(function: Callable[[], object]) -> object:
    return function()


def listed(function: Callable[[], object]) -> list[object]:
    return [function()]
