"""Every call ends whatever hostile exceptions and values do, also where farcall is like torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour import helpers
from behaviour import test_hostile_errors as native
from behaviour.helpers import wait_until
from behaviour.standing_in import stands_in
from farcall import rpc
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.runtime.agent import Agent

ALL_ERRORS = [kind for kinds in native.ERRORS.values() for kind in kinds.values()]
ERRORS = [
    native.BadMove,
    *(kind for kind in ALL_ERRORS if kind.__name__.endswith("_ValueError")),
    *(kind for kind in ALL_ERRORS if "_str_" in kind.__name__ or "_repr_" in kind.__name__),
    *native.BASE_ERRORS,
]
VALUES = [kinds[ValueError] for kinds in native.VALUES.values()]


_no_hostile_garbage = native._no_hostile_garbage


@pytest.fixture
def pair(start: Callable[..., list[Agent]]) -> list[Agent]:
    return start(2, quirks=LIKE_TORCH)


@pytest.fixture(autouse=True)
def _standing_in(pair: list[Agent]) -> Iterator[None]:
    with stands_in(pair, native, helpers):
        yield


def check_all_end(pair: list[Agent], calls: Iterator[Callable[[], Any]]) -> None:
    for result in native.outcomes_of(calls):
        assert not issubclass(type(result), rpc.NotInitialized | rpc.RpcTimeout), type(result)
    wait_until(lambda: all(native.is_idle(agent) for agent in pair))
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@pytest.mark.usefixtures("without_reports_of_torch")
@pytest.mark.parametrize("kind", dict.fromkeys(ERRORS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("transport", ["native"])
def test_every_call_ends_that_fails_with_a_hostile_exception(pair: list[Agent], kind: type) -> None:
    check_all_end(pair, native.calls_that_fail(kind.__name__))


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("transport", ["native"])
def test_every_call_ends_that_carries_a_hostile_value(pair: list[Agent], kind: type) -> None:
    check_all_end(pair, native.calls_with_values(kind.__name__))
