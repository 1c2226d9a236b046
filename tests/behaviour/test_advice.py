"""The warning about gradients that won't come back: at the user's line, once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from beginnings import Beginning, ends_with_module
from torch import nn

from farcall import rpc
from farcall.errors import GradientWarning
from farcall.nn import RemoteModule
from farcall.runtime.agent import Agent

WORKERS = ("w0", "w1")  # a call of oneself, and of another


class Scale(nn.Module):
    def forward(self, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return value * 2


def here() -> int:
    """Return the line after the one that calls this."""
    return sys._getframe(1).f_lineno + 1


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def in_a_handler(to: str) -> tuple[int, list[tuple[str, int]]]:
    with caught() as found:
        line = here()
        rpc.rpc_sync(to, torch.neg, args=(leaf(),))
    return line, places(found)


@contextmanager
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def places(found: list[warnings.WarningMessage]) -> list[tuple[str, int]]:
    return [(one.filename, one.lineno) for one in found if one.category is GradientWarning]


# Each makes one call, and gives the line of it.


def sync(to: str) -> int:
    line = here()
    rpc.rpc_sync(to, torch.neg, args=(leaf(),))
    return line


def by_keyword(to: str) -> int:
    line = here()
    rpc.rpc_sync(to, torch.neg, kwargs={"input": leaf()})
    return line


def nested_in_a_list(to: str) -> int:
    line = here()
    rpc.rpc_sync(to, torch.stack, args=([leaf(), leaf()],))
    return line


def asynchronous(to: str) -> int:
    line = here()
    rpc.rpc_async(to, torch.neg, args=(leaf(),)).wait()
    return line


def remote(to: str) -> int:
    line = here()
    rpc.remote(to, torch.neg, args=(leaf(),)).to_here()
    return line


def proxy_sync(to: str) -> int:
    rref = rpc.remote(to, Scale)
    line = here()
    rref.rpc_sync().forward(leaf())
    return line


def proxy_async(to: str) -> int:
    rref = rpc.remote(to, Scale)
    line = here()
    rref.rpc_async().forward(leaf()).wait()
    return line


def proxy_remote(to: str) -> int:
    rref = rpc.remote(to, Scale)
    line = here()
    rref.remote().forward(leaf()).to_here()
    return line


def module(to: str) -> int:
    remote_module = RemoteModule(to, Scale)
    line = here()
    remote_module(leaf())
    return line


def module_in_a_module(to: str) -> int:
    local = nn.Sequential(nn.Identity(), RemoteModule(to, Scale))
    line = here()
    local(leaf())
    return line


def module_forward(to: str) -> int:
    remote_module = RemoteModule(to, Scale)
    line = here()
    remote_module.forward(leaf())
    return line


def module_async(to: str) -> int:
    remote_module = RemoteModule(to, Scale)
    line = here()
    remote_module.forward_async(leaf()).wait()
    return line


def profiled(to: str) -> int:
    with torch.profiler.profile():
        line = here()
        rpc.rpc_sync(to, torch.neg, args=(leaf(),))
    return line


def profiled_proxy(to: str) -> int:
    rref = rpc.remote(to, Scale)
    with torch.profiler.profile():
        line = here()
        rref.rpc_async().forward(leaf()).wait()
    return line


WAYS: list[Callable[[str], int]] = [
    *(sync, by_keyword, nested_in_a_list, asynchronous, remote),
    *(proxy_sync, proxy_async, proxy_remote),
    *(module, module_in_a_module, module_forward, module_async),
    *(profiled, profiled_proxy),
]


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize("to", WORKERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_warning_is_at_the_line_that_makes_the_call_and_comes_once(
    pair: list[Agent], way: Callable[[str], int], to: str
) -> None:
    with caught() as found:
        lines = [way(to) for _ in range(3)]
    assert places(found) == [(__file__, lines[0])]


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize("to", WORKERS)
def test_the_warning_of_a_handler_is_at_the_handlers_line(pair: list[Agent], to: str) -> None:
    line, found = rpc.rpc_sync("w1", in_a_handler, args=(to,))
    assert found == [(__file__, line)]


@pytest.mark.parametrize("transport", ["inproc"])
def test_a_user_that_makes_it_an_error_gets_it_each_time(pair: list[Agent]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        for way in (sync, asynchronous, proxy_sync, sync):
            with pytest.raises(GradientWarning):
                way("w1")
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize(
    ("way", "name"),
    [(sync, "torch:neg"), (proxy_sync, "method 'forward' of a remote value")],
)
def test_it_names_the_function_as_the_user_knows_it(
    pair: list[Agent], way: Callable[[str], int], name: str
) -> None:
    with caught() as found:
        way("w1")
    assert f"the call of {name} on worker 'w1'" in str(found[0].message)


@pytest.mark.parametrize("transport", ["inproc"])
def test_it_can_be_switched_off(pair: list[Agent]) -> None:
    with caught() as found:
        warnings.filterwarnings("ignore", category=GradientWarning)
        sync("w1")
    assert found == []


PROGRAM = """
warnings.resetwarnings()  # those of the switches of Python, and of imports
warnings.simplefilter({action!r})
sys.stderr = io.StringIO()
for name in ("first", "second"):
    options = rpc.RpcBackendOptions(init_method="file://{store}")
    rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
    rpc.rpc_sync(name, torch.neg, args=(torch.ones(2, requires_grad=True),))
    rpc.remote(name, torch.neg, args=(torch.ones(2, requires_grad=True),)).to_here()
    rpc.shutdown()
print(json.dumps(sys.stderr.getvalue()))
"""

beginning = Beginning("import io, json, sys, warnings, torch; from farcall import rpc")
end = ends_with_module(beginning)


@pytest.mark.parametrize("action", ["default", "always", "ignore"])
def test_it_comes_once_in_a_process_also_if_that_starts_again(tmp_path: Path, action: str) -> None:
    said = beginning.run(PROGRAM.format(action=action, store=tmp_path / "store"))
    assert isinstance(said, str)
    assert said.count("GradientWarning: ") == (0 if action == "ignore" else 1)
