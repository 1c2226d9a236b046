"""Ctrl-C ends every wait of the main thread at once, and the worker works on afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, call, join, leave, leave_all
from launching import free_port

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.membership import store_probe

pytestmark = pytest.mark.timeout(600)

TRANSPORTS = ("native", "socket")


# In the workers.

_go_on = threading.Event()


def hold(arrived: str, value: Any = None) -> Any:
    """Say that the call is here, and keep its caller waiting until `go_on` is called."""
    Path(arrived).touch()
    assert _go_on.wait(PATIENCE)
    return value


def go_on() -> None:
    _go_on.set()


def begin_anew() -> None:
    _go_on.clear()


class Held(torch.nn.Module):
    def __init__(self, arrived: str) -> None:
        super().__init__()
        self.arrived = arrived
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hold(self.arrived)
        return x * self.weight


class HeldBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrived: str) -> torch.Tensor:
        ctx.arrived = arrived
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return hold(ctx.arrived, gradient * 2), None


class HeldStep(torch.optim.SGD):
    def __init__(self, parameters: Any, arrived: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.arrived = arrived

    def step(self, closure: Any = None) -> None:
        hold(self.arrived)
        super().step(closure)


def held_backward(x: torch.Tensor, arrived: str) -> torch.Tensor:
    return HeldBackward.apply(x, arrived)  # type: ignore[no-any-return]


def make_parameter() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(2))


def use(parameter: rpc.RRef[Any]) -> torch.Tensor:
    return (parameter.local_value() * 3).sum()


# The waits.


def by_sync(arrived: str) -> None:
    rpc.rpc_sync("w1", hold, args=(arrived,))


def by_wait(arrived: str) -> None:
    rpc.rpc_async("w1", hold, args=(arrived,)).wait()


def by_wait_without_limit(arrived: str) -> None:
    rpc.rpc_async("w1", hold, args=(arrived,), timeout=0).wait()


def by_then(arrived: str) -> None:
    rpc.rpc_async("w1", hold, args=(arrived,)).then(lambda f: f.wait()).wait()


def by_each(arrived: str) -> None:
    futures = [rpc.rpc_async("w1", hold, args=(arrived,)) for _ in range(3)]
    [future.wait() for future in futures]


def by_wait_in_a_context(arrived: str) -> None:
    with dist_autograd.context():
        rpc.rpc_async("w1", hold, args=(arrived, torch.ones(2, requires_grad=True))).wait()


def by_callback(arrived: str) -> None:
    """Hold another thread in the callbacks of a future that is done."""
    future = rpc.rpc_async("w1", hold, args=(arrived,))
    future.add_done_callback(lambda _: None)
    future.wait()


def by_to_here(arrived: str) -> None:
    rpc.remote("w1", hold, args=(arrived,)).to_here()


def by_local_value(arrived: str) -> None:
    rpc.remote("w0", hold, args=(arrived,)).local_value()


def by_call_to_itself(arrived: str) -> None:
    rpc.rpc_sync("w0", hold, args=(arrived,))


def by_method(arrived: str) -> None:
    rpc.remote("w1", Held, args=(arrived,)).rpc_sync().forward(torch.ones(2))


def by_method_later(arrived: str) -> None:
    rpc.remote("w1", Held, args=(arrived,)).rpc_async().forward(torch.ones(2)).wait()


def by_module(arrived: str) -> None:
    RemoteModule("w1/cpu", Held, args=(arrived,))(torch.ones(2))


def by_module_later(arrived: str) -> None:
    RemoteModule("w1/cpu", Held, args=(arrived,)).forward_async(torch.ones(2)).wait()


def by_backward(arrived: str) -> None:
    with dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("w1", held_backward, args=(x, arrived))
        dist_autograd.backward(context, [y.sum()])


def by_step(arrived: str) -> None:
    parameter = rpc.remote("w1", make_parameter)
    optimizer = DistributedOptimizer(HeldStep, [parameter], arrived)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("w1", use, args=(parameter,))
        dist_autograd.backward(context, [loss])
        optimizer.step(context)


def by_await(arrived: str) -> None:
    async def wait() -> None:
        await rpc.rpc_async("w1", hold, args=(arrived,))

    asyncio.run(wait())


def by_gather(arrived: str) -> None:
    async def wait() -> None:
        await asyncio.gather(*[rpc.rpc_async("w1", hold, args=(arrived,)) for _ in range(3)])

    asyncio.run(wait())


WAITS = [value for name, value in list(vars().items()) if name.startswith("by_")]


# Steps.


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hear(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with hearing_ctrl_c():
        return step(*args, **kwargs)


_kept: list[Any] = []


def wait_for_the_same(arrived: str) -> None:
    """Wait for one future in each of these steps."""
    if not _kept:
        _kept.append(rpc.rpc_async("w1", hold, args=(arrived, 7), timeout=0))
    _kept[0].wait()


def value_of_the_same() -> Any:
    return _kept.pop().wait()


def press_and_use(arrived: str) -> list[Any]:
    """Ctrl-C within a `with` block: its end and the next call work."""
    with dist_autograd.context():
        try:
            rpc.rpc_async("w1", hold, args=(arrived,)).wait()
        except KeyboardInterrupt:
            return [
                rpc.rpc_sync("w1", abs, args=(-1,)),
                rpc.rpc_async("w1", abs, args=(-2,)).wait(),
            ]
    return []


# In the test.


def wait_for(arrived: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not arrived.exists():
        assert time.monotonic() < deadline, "the call did not arrive"
        time.sleep(0.001)


def wait_until_it_hears(member: Member) -> None:
    """Wait until the member is in `hear`: Ctrl-C that comes before is ignored, and lost."""
    status = Path(f"/proc/{member.process.pid}/status")
    deadline = time.monotonic() + PATIENCE
    while True:
        caught = re.search(r"^SigCgt:\s*(\w+)$", status.read_text(), flags=re.MULTILINE)
        assert caught is not None
        if int(caught[1], 16) & 1 << (signal.SIGINT - 1):
            return
        assert time.monotonic() < deadline, "the step has not begun, or has ended"
        time.sleep(0.001)


def wait_until_blocked(member: Member) -> None:
    """Wait until the member's main thread sleeps. If it goes on, Ctrl-C finds it elsewhere."""
    pid = member.process.pid
    stat = Path(f"/proc/{pid}/task/{pid}/stat")
    deadline = time.monotonic() + PATIENCE
    seen = 0
    while seen < 20:
        assert time.monotonic() < deadline, "the main thread does not sleep"
        seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.001)


def press(member: Member) -> None:
    """Ctrl-C, while the member waits in `hear`."""
    wait_until_it_hears(member)
    wait_until_blocked(member)
    member.signal(signal.SIGINT)


def check_ctrl_c_ends(member: Member, what: str = "") -> None:
    """Ctrl-C, and it ends what the member does."""
    press(member)
    try:
        error: BaseException = member.fails()
    except AssertionError as failure:
        error = failure
    assert type(error) is KeyboardInterrupt, what


def check_that_all_works(one: Member, other: Member) -> None:
    assert one.run(call, "w1", abs, -3) == 3
    assert one.run(later, "w1", -4) == 4
    assert other.run(call, "w0", abs, -3) == 3


def later(to: str, number: int) -> Any:
    return rpc.rpc_async(to, abs, args=(number,)).wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_wait(crew: Crew, tmp_path: Path, transport: str) -> None:
    one, other = crew.group(2, transports=[transport])
    for wait in WAITS:
        arrived = tmp_path / wait.__name__
        one.start(hear, wait, str(arrived))
        wait_for(arrived)
        check_ctrl_c_ends(one, wait.__name__)
        for member in (one, other):
            member.run(go_on)
        check_that_all_works(one, other)
        for member in (one, other):
            member.run(begin_anew)
    for member in (one, other):
        member.run(go_on)  # some of several calls may have begun to wait only now
    leave_all(one, other)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waiting_again_for_a_future_whose_wait_was_interrupted(
    crew: Crew, tmp_path: Path, transport: str
) -> None:
    one, other = crew.group(2, transports=[transport])
    arrived = tmp_path / "arrived"
    for _ in range(5):
        one.start(hear, wait_for_the_same, str(arrived))
        wait_for(arrived)
        check_ctrl_c_ends(one)
    other.run(go_on)
    assert one.run(value_of_the_same) == 7
    leave_all(one, other)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_in_a_with_block(crew: Crew, tmp_path: Path, transport: str) -> None:
    one, other = crew.group(2, transports=[transport])
    arrived = tmp_path / "arrived"
    one.start(hear, press_and_use, str(arrived))
    wait_for(arrived)
    press(one)
    assert one.result() == [1, 2]
    other.run(go_on)
    leave_all(one, other)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 50_000_000])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_peer_that_is_stopped(crew: Crew, transport: str, size: int, is_first: bool) -> None:
    """Dialling, sending and waiting for the answer."""
    one, other = crew.group(2, transports=[transport])
    if not is_first:
        check_that_all_works(one, other)
    other.stop()
    for step in (call, call_later):
        one.start(hear, step, "w1", len, b"x" * size)
        check_ctrl_c_ends(one)
    other.signal(signal.SIGCONT)
    check_that_all_works(one, other)
    leave_all(one, other)


def call_later(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_async(to, function, args=args).wait()


# The beginning and the end.


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_graceful_shutdown(crew: Crew, transport: str) -> None:
    """End it and the group; a second Ctrl-C has nothing to end."""
    one, other = crew.group(2, transports=[transport])
    check_that_all_works(one, other)
    other.start(hear, leave)
    check_ctrl_c_ends(other)
    one.run(leave)
    with pytest.raises(rpc.NotInitialized):
        other.run(leave)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_graceful_shutdown_that_waits_for_a_call(
    crew: Crew, tmp_path: Path, transport: str
) -> None:
    one, other = crew.group(2, transports=[transport])
    arrived = tmp_path / "arrived"
    one.run(begin_call, str(arrived))
    wait_for(arrived)
    one.start(hear, leave)
    check_ctrl_c_ends(one)
    other.run(go_on)
    other.run(leave)


def begin_call(arrived: str) -> None:
    _kept.append(rpc.rpc_async("w1", hold, args=(arrived,), timeout=0))


def test_the_second_ctrl_c_ends_the_wait_that_the_first_began(crew: Crew, tmp_path: Path) -> None:
    """Shut down at the first Ctrl-C; an impatient user presses it again."""
    one, other = crew.group(2)
    arrived = tmp_path / "arrived"
    one.start(hear, wait_and_leave, str(arrived))
    wait_for(arrived)
    press(one)
    wait_for(tmp_path / "arrived.leaving")
    check_ctrl_c_ends(one)
    other.run(go_on)
    other.run(leave)


def wait_and_leave(arrived: str) -> None:
    try:
        rpc.rpc_async("w1", hold, args=(arrived,), timeout=0).wait()
    finally:
        Path(f"{arrived}.leaving").touch()
        rpc.shutdown()


@pytest.mark.parametrize("kind", ["file", "host", "closed", "silent", "resolver"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_init_rpc(crew: Crew, kind: str, transport: str) -> None:
    """Interrupt it in each of its phases; afterwards another one succeeds."""
    member = crew.member()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = {
            "file": f"{crew.init_method}.other",
            "host": f"tcp://127.0.0.1:{free_port()}",
            "closed": f"tcp://127.0.0.1:{bound.getsockname()[1]}",
            "silent": f"tcp://127.0.0.1:{server.getsockname()[1]}",
            "resolver": "tcp://a.name.that.takes.long:1",
        }[kind]
        rank = 0 if kind in ("file", "host") else 1
        member.start(hear, join_slowly, "w0", rank, 2, url, transports=[transport])
        check_ctrl_c_ends(member)
    member.run(join, "w0", 0, 1, crew.init_method)
    member.run(leave)


def join_slowly(*args: Any, **kwargs: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        usual = socket.getaddrinfo

        def ask(host: str | bytes, *more: Any, **options: Any) -> Any:
            name = host if isinstance(host, bytes) else host.encode()
            if name.startswith(b"a.name"):
                threading.Event().wait()
            return usual(host, *more, **options)

        patch.setattr(store_probe.socket, "getaddrinfo", ask)
        join(*args, **kwargs)


@pytest.mark.parametrize("phase", ["before", "after"])
def test_init_rpc_whose_store_is_stopped(crew: Crew, phase: str) -> None:
    """Rank 0, which hosts the store, is there and does not answer any more."""
    host, member = crew.members(2)
    url = f"tcp://127.0.0.1:{free_port()}"
    host.start(join, "w0", 0, 3, url)
    if phase == "after":
        member.start(hear, join, "w1", 1, 3, url)
        wait_until_blocked(member)
    else:
        wait_until_blocked(host)
    host.stop()
    if phase == "before":
        member.start(hear, join, "w1", 1, 3, url)
    check_ctrl_c_ends(member)
    os.kill(host.process.pid or 0, signal.SIGCONT)
