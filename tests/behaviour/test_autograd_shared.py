"""Distributed autograd where a tensor, a leaf or a part of the graph is used on several ways.

Every node runs once, hooks are called once and with the whole gradient, as in one process (BWD-1).
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import Run, add_weight, compare, times, weights
from farcall.autograd.passes import Pass
from farcall.protocol.passes import PassMachine, PassState
from farcall.runtime.agent import Agent


def multiply_both(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y * run["w"]


def test_tensor_sent_twice_in_one_message(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.node(run["x"].exp(), "sent")
        return run.call("w1", multiply_both, run, h, h).sum()

    compare(pair, program)


def test_tensor_and_a_view_of_it_in_one_message(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.node(run["x"].exp(), "sent")
        return run.call("w1", multiply_both, run, h, h[1:2]).sum()

    compare(pair, program)


def test_tensor_sent_twice_in_two_messages(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.node(run["x"].exp(), "sent")
        first = run.call("w1", times, run, "w", h)
        second = run.call("w1", add_weight, run, "w", h)
        return (first * second).sum()

    compare(pair, program)


class WatchedLock:
    """The lock of a pass, which notes which gradients are there whenever a thread acquires it."""

    def __init__(self, backward: Pass) -> None:
        self._backward = backward
        self._lock = threading.Lock()
        self.seen: set[int] = set()

    def acquire(self, blocking: bool = True) -> bool:
        acquired = self._lock.acquire(blocking)
        if acquired:
            self.seen = set(self._backward._gradients)
        return acquired

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:  # a condition asks for this method since Python 3.14
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_waiting_run_sees_a_gradient_only_together_with_its_share(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:  # BWD-3: it would be over with the source before it has the share to give back
    locks: dict[PassMachine, WatchedLock] = {}
    seen_before: list[bool] = []
    make, arrive = Pass.__init__, PassMachine.arrive

    def watched(self: Pass, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._lock = locks[self._machine] = WatchedLock(self)  # type: ignore[assignment]

    def checked(self: PassMachine, source: int, share: int) -> Any:
        if self.state is PassState.TOGETHER:
            seen_before.append(source in locks[self].seen)
        return arrive(self, source, share)

    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.node(run["x"].exp(), "sent")
        first = run.call("w1", times, run, "w", h)
        second = run.call("w1", add_weight, run, "w", h)
        return (first * second).sum()

    monkeypatch.setattr(Pass, "__init__", watched)
    monkeypatch.setattr(PassMachine, "arrive", checked)
    compare(pair, program)
    assert seen_before
    assert not any(seen_before)


def test_tensor_sent_on_as_it_arrived(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w2")
        return run.call("w1", forward_to, run, "w2", run["x"]).sum()

    compare(trio, program)


def forward_to(run: Run, to: str, x: torch.Tensor) -> torch.Tensor:
    return run.call(to, times, run, "a", x)


def test_argument_given_back_as_the_result(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        return (run.call("w1", give_back, run["x"]) * run["x"]).sum()

    compare(pair, program)


def give_back(x: torch.Tensor) -> torch.Tensor:
    return x


def test_result_given_twice(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        first, second = run.call("w1", give_twice, run, run["x"])
        return (first * second.sin()).sum()

    compare(pair, program)


def give_twice(run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = times(run, "w", x)
    return h, h


def test_same_parameter_on_several_paths(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        first = run.call("w1", times, run, "a", run["x"])
        second = run.call("w2", forward_then_add, run, first)
        return (first * second * run["x"]).sum()

    compare(trio, program)


def forward_then_add(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run.call("w1", add_weight, run, "a", x) + x


def test_parameter_used_by_its_owner_and_sent_to_others(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        x = run["x"]
        one = run.call("w1", torch.mul, x, x.detach())
        two = run.call("w2", torch.exp, x)
        return (one + two + x**3).sum()

    compare(trio, program)


def test_each_node_runs_once_when_a_call_and_the_loss_share_a_part(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, w="w0", a="w1")
        h = run.hook(run.node(run["w"].tanh(), "h"), "h")
        r = run.call("w1", times, run, "a", h)
        return (run.node(r.sin(), "g") * h).sum()

    compare(pair, program)


def test_each_node_runs_once_when_many_calls_share_parts(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, w="w0", a="w1", b="w2")
        h1 = run.hook(run.node(run["w"].tanh(), "h1"), "h1")
        r1 = run.call("w1", times, run, "a", h1)
        h2 = run.hook(run.node(h1 * r1, "h2"), "h2")
        r2 = run.call("w2", times, run, "b", h2)
        h3 = run.hook(run.node(h2 + r2 * r1 + h1, "h3"), "h3")
        r3 = run.call("w1", add_weight, run, "a", h3)
        return (r3 * h3 + r1 + h1).sum()

    compare(trio, program)


def split_and_send(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Split one node into several outputs: some are used here, some sent, one not used."""
    first, second, third, _ = run.node(x * run["a"], "before split").unbind()
    sent = run.call("w2", torch.sin, second)
    return run.call("w2", torch.mul, sent, third) + first + second


def test_each_output_of_a_node_on_another_way(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        return run.call("w1", split_and_send, run, run["x"])

    compare(trio, program)
