"""An error of another worker ends with the address of its section, once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from error_sections import made, sections

from behaviour.helpers import WAYS
from farcall import errors, rpc
from farcall.runtime.agent import Agent


def raise_made(name: str) -> None:
    error = made(name)
    error.add_note("a note")
    traceback.format_exception(error)  # as a log on the callee does
    raise error


class Unsendable(errors.Refused):
    def __reduce__(self) -> Any:
        raise TypeError("can't be reduced")


def raise_unsendable(name: str) -> None:
    raise Unsendable("x") from made(name)


@pytest.mark.parametrize("full", ["0", "1"])
@pytest.mark.parametrize("call", WAYS)
def test_each_error_arrives_with_one_address(
    pair: list[Agent], call: Callable[..., Any], full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_FULL_TRACEBACKS", full)
    for name in errors.__all__:
        with pytest.raises(getattr(errors, name)) as raised:
            call("w1", raise_made, (name,))
        assert sections(raised.value) == [name]
        assert raised.value.__notes__[:-1] == ["a note"]
        assert "troubleshooting" not in raised.value.remote_traceback


@pytest.mark.parametrize("full", ["0", "1"])
def test_an_error_passed_on_by_a_second_worker_has_one_address(
    trio: list[Agent], full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_FULL_TRACEBACKS", full)
    with pytest.raises(errors.RpcTimeout) as raised:
        rpc.rpc_sync("w1", rpc.rpc_sync, args=("w2", raise_made, ("RpcTimeout",)))
    assert sections(raised.value) == ["RpcTimeout"]


@pytest.mark.parametrize("full", ["0", "1"])
def test_an_error_that_can_not_be_rebuilt_has_the_address_of_its_stand_in(
    pair: list[Agent], full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_FULL_TRACEBACKS", full)
    with pytest.raises(errors.RemoteError, match="Unsendable") as raised:
        rpc.rpc_sync("w1", raise_unsendable, args=("RpcTimeout",))
    assert sections(raised.value) == ["RpcTimeout", "RemoteError"]


def test_strict_workers_send_and_take_errors_with_one_address(
    start: Callable[..., list[Agent]],
) -> None:
    start(2, policies={"w0": rpc.Only(), "w1": rpc.Only([raise_made])})
    for name in errors.__all__:
        with pytest.raises(Exception, match="a note") as raised:
            rpc.rpc_sync("w1", raise_made, args=(name,))
        expected = name if type(raised.value).__name__ == name else "RemoteError"
        assert sections(raised.value) == [expected]


@pytest.mark.parametrize("call", WAYS)
def test_an_error_that_farcall_finds_here_has_its_address(
    pair: list[Agent], call: Callable[..., Any]
) -> None:
    with pytest.raises(errors.UnknownWorker) as raised:
        call("nobody", made, ("RpcTimeout",))
    assert sections(raised.value) == ["UnknownWorker"]
