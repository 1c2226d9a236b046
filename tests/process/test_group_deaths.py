"""Groups of `farcall.local` that end, and their workers that die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from patience import PATIENCE

import farcall
from farcall import errors, rpc
from farcall.groups import Group, endings


def my_name() -> str:
    return rpc.get_worker_info().name


def end(code: int) -> None:
    os._exit(code)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def stay() -> None:
    threading.Event().wait()


def kill_at_two(number: int) -> int:
    if number == 2:
        kill(signal.SIGKILL)
    return number


def say(text: str) -> None:
    print(text)


def draw() -> tuple[float, float]:
    return torch.rand(1).item(), float(numpy.random.rand())


@pytest.fixture
def mortals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Workers that a test may kill. On a busy machine, too, their errors say how they ended."""
    for module in (endings, farcall.groups.group):
        monkeypatch.setattr(module, "OBITUARY_SECONDS", PATIENCE)
    with farcall.local(3) as made:
        yield made


@pytest.mark.parametrize("processes", [True, False])
def test_a_closed_group_says_so(processes: bool) -> None:
    group = farcall.local(1, names=["actor"], processes=processes, num_worker_threads=2)
    assert group["actor"].call(my_name) == "actor"
    group.close()
    group.close()
    for call in (group[0].call, group[0].call_async, group[0].remote):
        with pytest.raises(errors.NotInitialized, match="this group is closed"):
            call(my_name)
    with pytest.raises(errors.NotInitialized, match="this group is closed"):
        group.map(abs, [1])
    with pytest.raises(errors.NotInitialized):
        rpc.get_worker_info()
    assert "closed" in repr(group)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n": 0}, ValueError, "n must be at least 1"),
    ({"n": 2.0}, TypeError, "n must be an int, not float"),
    ({"n": True}, TypeError, "n must be an int, not bool"),
    ({"n": 2, "names": ["a"]}, ValueError, "names must be 2"),
    ({"n": 2, "names": ["a", "a"]}, ValueError, "names must differ"),
    ({"n": 1, "names": ["main"]}, ValueError, "that is the driver"),
    ({"n": 1, "names": "a"}, TypeError, "not one text"),
    ({"n": 1, "names": ["a b"]}, errors.InvalidName, "a b"),
    ({"n": 1, "threads": 3}, TypeError, "unexpected keyword argument 'threads'"),
    ({"n": 1, "num_worker_threads": 0}, ValueError, "num_worker_threads"),
    ({"n": 1, "init_method": "env://"}, TypeError, "takes no init_method: the workers meet"),
    ({"n": 1, "listen": "0.0.0.0"}, TypeError, "takes no listen"),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG)
@pytest.mark.parametrize("processes", [True, False])
def test_errors_of_arguments_are_said_before_anything_starts(
    arguments: dict[str, Any], kind: type[Exception], text: str, processes: bool
) -> None:
    with pytest.raises(kind, match=text):
        farcall.local(**arguments, processes=processes)


def test_a_lost_worker_is_told_of_in_words(mortals: Group) -> None:
    with pytest.raises(errors.PeerLost, match="its process ended: killed by SIGKILL: out of mem"):
        mortals[0].call(kill, signal.SIGKILL)
    with pytest.raises(errors.PeerLost, match="its process ended: exit code 3"):
        mortals[1].call_async(end, 3).wait()
    assert mortals[1].ended == "exit code 3"
    assert mortals[2].ended is None
    assert mortals.map(abs, [-1, -2]) == [1, 2]  # on the one that is left
    with pytest.raises(errors.PeerLost, match="killed by SIGKILL") as caught:
        mortals.all.call(my_name)
    assert any("on 'worker0'" in note for note in caught.value.__notes__)


def test_every_way_to_wait_for_a_lost_worker_is_told_in_words(mortals: Group) -> None:
    pending = rpc.rpc_async("worker0", stay)
    value = rpc.remote("worker0", stay)
    with pytest.raises(errors.PeerLost, match="its process ended: killed by SIGKILL: out of mem"):
        rpc.rpc_sync("worker0", kill, args=(signal.SIGKILL,))
    for ask in (pending.wait, value.to_here, lambda: rpc.rpc_sync("worker0", my_name)):
        with pytest.raises(errors.PeerLost, match="its process ended: killed by SIGKILL"):
            ask()
    with pytest.raises(errors.PeerLost, match="its process ended: exit code 3"):
        rpc.rpc_sync("worker1", end, args=(3,))


def test_map_fails_definitely_when_a_worker_dies(mortals: Group) -> None:
    with pytest.raises(errors.PeerLost, match="killed by SIGKILL") as caught:
        mortals.map(kill_at_two, range(1000))
    assert any("item 2 of map" in note for note in caught.value.__notes__)
    for worker in mortals:
        if worker.ended is None:
            with pytest.raises(errors.PeerLost):
                worker.call(kill, signal.SIGTERM)
    with pytest.raises(errors.PeerLost, match="its process ended"):
        mortals.map(abs, [1])


def test_the_output_of_workers_is_kept(mortals: Group) -> None:
    mortals.all.call(say, "first")
    mortals[1].call(say, "second")
    assert mortals.logs(1) == "first\nsecond"
    assert mortals[1].logs(last=1) == mortals.logs("worker1", 1) == "second"
    assert mortals.logs(2) == "first"


def test_workers_draw_different_numbers_and_share_the_cores(mortals: Group) -> None:
    drawn = mortals.all.call(draw)
    assert len({one for one, _ in drawn}) == len({other for _, other in drawn}) == 3
    threads = mortals.all.call(torch.get_num_threads)
    assert sum(threads) <= max(3, torch.get_num_threads())


def test_a_fork_of_the_driver_does_not_end_the_group(mortals: Group) -> None:
    child = os.fork()
    if child == 0:
        try:
            mortals.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert mortals.all.call(abs, -1) == [1, 1, 1]
