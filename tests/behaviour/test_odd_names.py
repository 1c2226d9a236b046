"""Names and ranks of numpy, of an `Enum` or of a class of the user's work as plain ones do."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # as in stores.py

import farcall
from behaviour.helpers import PATIENCE
from behaviour.open_group import OpenGroup
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


class Text(str):
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this can't be pickled")


class Job(enum.StrEnum):
    TRAINER = "trainer"


KINDS = [Text, np.str_]


def fail(message: str, kind: type[str]) -> None:
    error = ValueError(kind(message))
    error.__notes__ = [kind("a note")]
    raise error


@pytest.fixture
def group() -> Iterator[OpenGroup]:
    group = OpenGroup()
    yield group
    group.close()


@pytest.mark.parametrize("kind", KINDS)
def test_workers_with_odd_names_meet_and_call(group: OpenGroup, kind: type[str]) -> None:
    first = group.join(kind("first"), kind("boss"))
    second = group.join(kind("second"), Job.TRAINER)
    with acting_as(first):
        assert rpc.wait_for(kind("second"), timeout=PATIENCE) == [second.me.info]
        assert [(one.name, one.role) for one in rpc.workers()] == [
            ("first", "boss"),
            ("second", "trainer"),
        ]
        assert rpc.rpc_sync(kind("second"), abs, args=(-1,)) == 1
        assert rpc.rpc_sync("second", rpc.get_worker_info) == second.me.info
        made = rpc.remote("second", list, args=((1, 2),), name=kind("numbers"))
        assert made.to_here() == [1, 2]
        assert rpc.get_object(kind("numbers")).to_here() == [1, 2]
        rpc.supervise(list, on=kind("trainer"), name=kind("kept"), strategy=kind("one_for_one"))
        assert rpc.get_object(kind("kept"), follow=True).to_here() == []
        with pytest.raises(rpc.UnknownWorker, match="'third'"):
            rpc.rpc_sync(kind("third"), abs, args=(-1,), timeout=PATIENCE)
    for agent in (first, second):
        assert {type(agent.me.name), type(agent.me.role), type(agent.me.info.name)} == {str}


class Number(int):
    pass


@pytest.mark.parametrize(
    "to", [Text("w1"), np.str_("w1"), Number(1), np.int64(1), np.uint8(1), torch.tensor(1)]
)
def test_a_worker_is_named_by_any_text_or_whole_number(pair: list[Agent], to: Any) -> None:
    info = pair[1].me.info
    assert rpc.get_worker_info(to) == info
    assert rpc.explain(to).name == "w1"
    assert rpc.rpc_sync(to, rpc.get_worker_info) == info
    assert rpc.rpc_async(to, rpc.get_worker_info, retry=1).wait() == info
    assert rpc.remote(to, rpc.get_worker_info).to_here() == info
    assert farcall.spawn(to, list).owner() == info


@pytest.mark.parametrize("to", [True, 1.0, np.float64(1), torch.tensor(1.0), b"w1", None, ["w1"]])
def test_a_value_that_names_no_worker_is_refused(pair: list[Agent], to: Any) -> None:
    with pytest.raises(rpc.UnknownWorker, match="named by a str, an int or a WorkerInfo"):
        rpc.rpc_sync(to, rpc.get_worker_info)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_an_error_travels(group: OpenGroup, kind: type[str]) -> None:
    first = group.join("first")
    group.join("second")
    with acting_as(first), pytest.raises(ValueError, match="this went wrong") as caught:
        rpc.rpc_sync("second", fail, args=("this went wrong", kind))
    assert "a note" in caught.value.__notes__


def test_init_rpc_takes_numbers_of_numpy() -> None:
    store = HashStore()
    size = np.int64(1)
    options = rpc.RpcBackendOptions(store=store, num_worker_threads=np.int64(4))
    rpc.init_rpc(np.str_("alone"), rank=np.int64(0), world_size=size, rpc_backend_options=options)
    try:
        info = rpc.get_worker_info()
        assert (info.name, info.id, type(info.name), type(info.id)) == ("alone", 0, str, int)
        assert rpc.rpc_sync(0, operator.neg, args=(2,)) == -2
    finally:
        rpc.shutdown()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rank": None}, "rank must be an int, not NoneType"),
        ({"rank": "0"}, "rank must be an int, not str"),
        ({"rank": True}, "rank must be an int, not bool"),
        ({"rank": 0, "world_size": 1.0}, "world_size must be an int, not float"),
    ],
)
def test_a_rank_that_is_no_number_is_refused_by_name(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        rpc.init_rpc("w", **wrong)


def test_a_group_takes_names_of_an_array() -> None:
    names = np.array(["left", "right"])
    with farcall.local(np.int64(2), processes=False, names=names) as group:  # type: ignore[arg-type]
        assert [worker.name for worker in group] == ["left", "right"]
        assert {type(worker.name) for worker in group} == {str}
        assert group.all.call(abs, -1) == [1, 1]
