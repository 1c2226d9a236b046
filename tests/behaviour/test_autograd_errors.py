"""Errors in a backward pass reach the root as themselves, and end the pass everywhere."""

from __future__ import annotations

import threading
import traceback
import warnings
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import (
    DistributedRun,
    Run,
    check_same,
    doubles,
    gradients_of,
    hold_up,
    weights,
)
from behaviour.helpers import PATIENCE, WAYS, Gate, Here, by_async, by_sync, in_threads
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.autograd.passes import Pass
from farcall.errors import GradientWarning, RemoteError
from farcall.protocol.pass_instructions import EndPass
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

each_way = pytest.mark.parametrize("way", WAYS)


class Fuse(Here):
    """Blows in the backward pass, until it is mended."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error: BaseException | None = error
        self.blown = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = _Fused.apply(x, self)
        return fused


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse) -> torch.Tensor:
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        blow(ctx.fuse)
        return gradient, None


def blow(fuse: Fuse) -> None:
    if fuse.error is not None:
        fuse.blown += 1
        raise fuse.error


class OutOfTune(Exception):
    def __init__(self, note: str, cents: int) -> None:
        super().__init__(f"{note} is off by {cents}")
        self.note, self.cents = note, cents


class NotToBeSent(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def pass_on(run: Run, route: list[tuple[str, str]], fuse: Fuse, x: torch.Tensor) -> torch.Tensor:
    """Calls along the route; the fuse is in the last one."""
    (_, name), *rest = route
    h = x * run[name]
    return run.call(rest[0][0], pass_on, run, rest, fuse, h).sin() if rest else fuse(h).cos()


ROUTES: dict[str, list[tuple[str, str]]] = {
    "at the root": [("w0", "a")],
    "one hop away": [("w1", "b")],
    "two hops away": [("w1", "b"), ("w2", "c")],
    "back at the root": [("w1", "b"), ("w2", "c"), ("w0", "a")],
}


def start_run(way: Any = by_sync) -> DistributedRun:
    run = DistributedRun(way)
    weights(run, x="w0", a="w0", b="w1", c="w2")
    return run


@each_way
@pytest.mark.parametrize("route", ROUTES)
def test_error_in_a_backward_function(trio: list[Agent], route: str, way: Any) -> None:
    run = start_run(way)
    places = ROUTES[route]
    with dist_autograd.context() as run.context_id:
        h = run.call(places[0][0], pass_on, run, places, Fuse(ValueError("planted")), run["x"])
        with pytest.raises(ValueError, match="planted") as raised:
            run.backward(h.sum())
    assert type(raised.value) is ValueError
    text = "".join(traceback.format_exception(raised.value))
    assert "in blow" in text
    assert "test_autograd_errors.py" in text
    if places[-1][0] != "w0":
        assert raised.value.remote_worker == places[-1][0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("route", ["at the root", "one hop away", "two hops away"])
def test_error_with_attributes(trio: list[Agent], route: str) -> None:
    run = start_run()
    places = ROUTES[route]
    with dist_autograd.context() as run.context_id:
        h = run.call(places[0][0], pass_on, run, places, Fuse(OutOfTune("A", 12)), run["x"])
        with pytest.raises(OutOfTune, match="A is off by 12") as raised:
            run.backward(h.sum())
    assert (raised.value.note, raised.value.cents) == ("A", 12)


@pytest.mark.parametrize("route", ["one hop away", "two hops away"])
def test_error_that_can_not_be_sent(trio: list[Agent], route: str) -> None:
    run = start_run()
    places = ROUTES[route]
    with dist_autograd.context() as run.context_id:
        h = run.call(places[0][0], pass_on, run, places, Fuse(NotToBeSent("secret")), run["x"])
        with pytest.raises(RemoteError, match="secret"):
            run.backward(h.sum())


def hooked(run: Run, fuse: Fuse, x: torch.Tensor) -> torch.Tensor:
    h = x * run["b"]
    h.register_hook(lambda gradient: blow(fuse))
    return h


def test_error_in_a_hook_of_a_callee(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", hooked, run, Fuse(LookupError("in the hook")), run["x"])
        with pytest.raises(LookupError, match="in the hook"):
            run.backward(h.sum())


def test_error_in_a_hook_of_a_leaf_of_a_callee(pair: list[Agent]) -> None:
    run = start_run()
    fuse = Fuse(LookupError("in the hook"))
    run["b"].register_hook(lambda gradient: blow(fuse))
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", pass_on, run, [("w1", "b")], Fuse(), run["x"])
        with pytest.raises(LookupError, match="in the hook"):
            run.backward(h.sum())
    assert fuse.blown == 1


def wrong_shape(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h.register_hook(lambda gradient: gradient[:1])
    return h


def test_error_that_torch_raises(pair: list[Agent]) -> None:
    with dist_autograd.context() as context_id:
        x = doubles(4).requires_grad_()
        h = rpc.rpc_sync("w1", wrong_shape, args=(x,))
        with pytest.raises(RuntimeError, match="size"):
            dist_autograd.backward(context_id, [h.sum()])


# After an error.


@each_way
@pytest.mark.parametrize("route", ROUTES)
def test_context_goes_on_after_an_error(trio: list[Agent], route: str, way: Any) -> None:
    """Try the pass again with the graph retained, as in PyTorch."""
    run = start_run(way)
    places = ROUTES[route]
    fuse = Fuse(ValueError("planted"))
    with dist_autograd.context() as run.context_id:
        root = run.call(places[0][0], pass_on, run, places, fuse, run["x"]).sum()
        for _ in range(5):
            with pytest.raises(ValueError, match="planted"):
                run.backward(root, retain_graph=True)
        fuse.error = None
        for _ in range(2):
            run.backward(root, retain_graph=True)
        x = doubles(4, seed=9).requires_grad_()
        run.leaves["other"], run.places["other"] = x, "w0"
        run.backward((rpc.rpc_sync("w1", torch.sin, args=(x,))).sum())
        check_same(run.gradient("other"), x.detach().cos(), "gradient after errors")


def test_next_context_is_right_after_an_error(trio: list[Agent]) -> None:
    run = start_run()
    places = ROUTES["two hops away"]
    fuse = Fuse(ValueError("planted"))
    expected: dict[str, torch.Tensor] = {}
    for step in range(20):
        fuse.error = ValueError("planted") if step % 2 else None
        with dist_autograd.context() as run.context_id:
            root = run.call("w1", pass_on, run, places, fuse, run["x"]).sum()
            if step % 2:
                with pytest.raises(ValueError, match="planted"):
                    run.backward(root)
                continue
            run.backward(root)
            found = gradients_of(trio, run)
            expected = expected or found
            assert sorted(found) == ["b", "c", "x"]
            for name, gradient in found.items():
                check_same(gradient, expected[name], name)


def slow_part(gate: Gate, run: Run, x: torch.Tensor) -> torch.Tensor:
    return hold_up(gate, x * run["c"])


@pytest.mark.parametrize("call", [by_sync, by_async])
def test_error_does_not_wait_for_workers_that_are_busy(
    trio: list[Agent], gate: Gate, call: Any
) -> None:
    """Raise at the root while another worker's backward function still runs."""
    run = start_run(call)
    fuse = Fuse(ValueError("planted"))
    with dist_autograd.context() as run.context_id:
        busy = run.call("w2", slow_part, gate, run, run["x"])
        broken = run.call("w1", wait_then_blow, gate, run, fuse, run["x"])
        with pytest.raises(ValueError, match="planted"):
            run.backward((busy * broken).sum())
        assert not gate.is_open
    assert gate.passed == 0
    gate.open()
    gate.wait_for_passed()


def wait_then_blow(gate: Gate, run: Run, fuse: Fuse, x: torch.Tensor) -> torch.Tensor:
    h = x * run["b"]

    def hook(gradient: torch.Tensor) -> None:
        gate.wait_for_arrivals()
        blow(fuse)

    h.register_hook(hook)
    return h


def test_errors_on_two_workers_at_once(trio: list[Agent]) -> None:
    run = start_run()
    for _ in range(20):
        fuses = Fuse(ValueError("planted in w1")), Fuse(KeyError("planted in w2"))
        with dist_autograd.context() as run.context_id:
            one = run.call("w1", pass_on, run, [("w1", "b")], fuses[0], run["x"])
            two = run.call("w2", pass_on, run, [("w2", "c")], fuses[1], run["x"])
            with pytest.raises((ValueError, KeyError), match="planted in"):
                run.backward((one * two).sum())


def test_context_that_ends_during_its_backward_pass(pair: list[Agent], gate: Gate) -> None:
    """End the context in another thread: `backward` raises, and the context is gone."""
    run = DistributedRun()
    weights(run, x="w0", c="w1")
    ends, ended = threading.Event(), threading.Event()

    def own_the_context() -> None:
        with acting_as(pair[0]):
            with dist_autograd.context() as run.context_id:
                root = run.call("w1", slow_part, gate, run, run["x"]).sum()
                roots.append(root)
                begun.set()
                assert ends.wait(PATIENCE)
            ended.set()

    roots: list[torch.Tensor] = []
    begun = threading.Event()

    def differentiate() -> None:
        with acting_as(pair[0]):
            assert begun.wait(PATIENCE)
            dist_autograd.backward(run.context_id, roots)

    with in_threads(own_the_context, differentiate) as results:
        gate.wait_for_arrivals()
        ends.set()
        assert ended.wait(PATIENCE)
    assert isinstance(results[1], rpc.Cancelled)
    assert "context" in str(results[1])
    gate.open()


# Workers that are lost.


def test_backward_to_a_worker_that_is_gone(trio: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", pass_on, run, [("w1", "b")], Fuse(), run["x"])
        g = run.call("w2", pass_on, run, [("w2", "c")], Fuse(), run["x"])
        trio[1].close()
        with pytest.raises(rpc.PeerLost) as raised:
            run.backward((h * g).sum(), retain_graph=True)
        assert raised.value.worker == "w1"
        run.backward((g * 2).sum())  # what does not need the lost one works


def test_backward_through_a_worker_that_is_gone(trio: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", pass_on, run, ROUTES["two hops away"], Fuse(), run["x"])
        trio[2].close()
        with pytest.raises(rpc.PeerLost) as raised:
            run.backward(h.sum())
        assert raised.value.worker == "w2"


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_worker_that_is_lost_in_the_middle_of_a_pass(
    trio: list[Agent], gate: Gate, mode: str
) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", pass_on_to_slow, gate, run, run["x"])

        def differentiate() -> None:
            with acting_as(trio[0]):
                dist_autograd.backward(run.context_id, [h.sum()], mode=mode)

        with in_threads(differentiate) as results:
            gate.wait_for_arrivals()
            closing = threading.Thread(target=trio[2].close, daemon=True)
            closing.start()
        assert type(results[0]) is rpc.PeerLost
        assert results[0].worker == "w2"
        gate.open()
        closing.join(PATIENCE)


def pass_on_to_slow(gate: Gate, run: Run, x: torch.Tensor) -> torch.Tensor:
    return run.call("w2", slow_part, gate, run, x * run["b"]).sin()


class Layer:
    """A parameter with a step that changes it in place."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight

    def step(self) -> None:
        with torch.no_grad():
            self.weight.mul_(2)


def test_a_tensor_that_another_trainer_changed_is_explained(pair: list[Agent]) -> None:
    layer = rpc.remote("w1", Layer)
    with dist_autograd.context() as context:
        loss = layer.rpc_sync().forward(torch.ones(2, requires_grad=True)).sum()
        layer.rpc_sync().step()
        with pytest.raises(RuntimeError) as raised:
            dist_autograd.backward(context, [loss])
    assert "modified by an inplace operation" in str(raised.value)
    assert any("take turns" in note for note in raised.value.__notes__)


def test_a_call_outside_of_a_context_warns_once_that_no_gradient_comes_back(
    pair: list[Agent],
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rpc.rpc_sync("w1", torch.neg, args=(leaf.detach(),))
        with torch.no_grad():
            rpc.rpc_sync("w1", torch.neg, args=(leaf,))
        with dist_autograd.context():
            rpc.rpc_sync("w1", torch.neg, args=(leaf,))
        assert caught == []
        for _ in range(2):
            rpc.rpc_sync("w1", torch.neg, args=(leaf,))
    assert [one.category for one in caught] == [GradientWarning]
    assert "torch:neg on worker 'w1'" in str(caught[0].message)


@pytest.mark.parametrize("cut", ["over", "failed"])
def test_pass_whose_end_a_ctrl_c_cuts_ends_at_once(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:  # BWD-5
    """Interrupt after the machine has said that the pass is over, and before that is done."""
    carry_out = Pass._carry_out
    interrupted = []

    def cut_once(self: Pass, todo: Any) -> None:
        if not interrupted and any(isinstance(each, EndPass) for each in todo):
            interrupted.append(todo)
            raise KeyboardInterrupt("between two steps")
        carry_out(self, todo)

    monkeypatch.setattr(Pass, "_carry_out", cut_once)
    fuse = Fuse(ValueError("blown") if cut == "failed" else None)
    with dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        sent = fuse(x)  # its gradient comes back from w1, and ends the pass
        loss = rpc.rpc_sync("w1", torch.add, args=(sent, sent), timeout=PATIENCE).sum()
        with pytest.raises(KeyboardInterrupt if cut == "over" else ValueError):
            dist_autograd.backward(context, [loss])
    assert interrupted
