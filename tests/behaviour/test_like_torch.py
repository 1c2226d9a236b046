"""With compat, agents raise what torch's would raise, in torch's words."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farcall.compat
from behaviour.helpers import WAYS
from behaviour.standing_in import standing_in
from farcall import rpc
from farcall.compat import rpc as compat_rpc
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.ids import Worker
from farcall.runtime.agent import Agent

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


@pytest.fixture
def late(start: Callable[..., list[Agent]]) -> Iterator[list[Agent]]:
    """Workers of which "w0" knew none when it was started, and "w2" none ever."""
    agents = start(3, quirks=LIKE_TORCH)
    for agent in agents:
        directory = agent.directory
        known = [agent.me, *(w.me for w in agents if agent is agents[1])]
        directory.__init__(agent.me, known, _finder(agents))  # type: ignore[misc]
    with standing_in(agents):
        yield agents


def _finder(agents: list[Agent]) -> Callable[[str | int], Worker | None]:
    known = {key: a.me for a in agents for key in (a.me.name, a.me.id)}
    return known.get


def fail(text: str) -> None:
    raise ValueError(text)


def fail_through(to: str) -> None:
    rpc.rpc_sync(to, fail, args=("inside",))


class Slotted(Exception):
    """Has no room for where it was raised."""

    __slots__ = ()
    __setattr__ = None  # type: ignore[assignment]


def fail_without_room() -> None:
    raise Slotted("full")


def result_of_no_future() -> int:
    return 1


@each_way
@pytest.mark.parametrize("to", ["w0", "w1", "w2"])
@pytest.mark.parametrize("transport", ["native"])
def test_error_of_any_worker_begins_as_torchs_does(late: list[Agent], to: str, call: Way) -> None:
    with pytest.raises(ValueError, match="On WorkerInfo") as raised:
        call(to, fail, ("the text",))
    lines = str(raised.value).splitlines()
    number = int(to[1])
    assert lines[:3] == [
        f"On WorkerInfo(id={number}, name={to}):",
        "ValueError('the text')",
        "Traceback (most recent call last):",
    ]


@pytest.mark.parametrize("transport", ["native"])
def test_error_through_a_worker_names_both_in_turn(late: list[Agent]) -> None:
    """Name the worker that was called first, as torch does. "w0" has never met "w2"."""
    with pytest.raises(ValueError, match="inside") as raised:
        rpc.rpc_sync("w1", fail_through, args=("w2",))
    lines = str(raised.value).splitlines()
    assert lines[0] == "On WorkerInfo(id=1, name=w1):"
    assert lines[1] == "ValueError('On WorkerInfo(id=2, name=w2):"
    assert lines[2] == "ValueError('inside')"


@each_way
@pytest.mark.parametrize("transport", ["native"])
def test_error_without_room_for_its_worker_is_made_anew_too(late: list[Agent], call: Way) -> None:
    with pytest.raises(Slotted, match="On WorkerInfo"):
        call("w1", fail_without_room)


@each_way
@pytest.mark.parametrize("transport", ["native"])
def test_async_function_that_gives_no_future(start: Any, call: Way) -> None:
    start(2)
    given = rpc.functions.async_execution(result_of_no_future)
    with pytest.raises(rpc.FarcallError, match=r"with @farcall.functions.async_execution must"):
        call("w1", given)
    with (
        standing_in(start(2, quirks=LIKE_TORCH)),
        pytest.raises(RuntimeError, match=r"decorated with @rpc.async_function must"),
    ):
        call("w1", given)
    assert traceback.format_exc()


def fail_after_a_call(to: str) -> None:
    compat_rpc.rpc_sync(to, fail, args=("the text",))


@pytest.mark.parametrize("transport", ["native"])
def test_first_call_meets_an_agent_that_is_like_torchs(
    transport: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Call as soon as there is an agent, and before `init_rpc` goes on."""

    def made(*args: Any, **options: Any) -> Agent:
        agent = Agent(*args, **options)
        with pytest.raises(ValueError, match=r"^On WorkerInfo\(id=0, name=w0\)"):
            agent.call("w0", fail_after_a_call, ("w0",))
        return agent

    monkeypatch.setattr("farcall.runtime.start.Agent", made)
    farcall.compat.install()
    try:
        options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:0")
        compat_rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
        compat_rpc.shutdown()
    finally:
        farcall.compat.uninstall()
    assert capsys.readouterr().err.startswith("On WorkerInfo(id=0, name=w0):\nValueError")
