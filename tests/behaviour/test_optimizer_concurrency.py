"""Several trainers step at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from behaviour.helpers import PATIENCE, Here, echo, in_threads
from behaviour.optimizing import (
    Model,
    context_gradient,
    make_gradients,
    make_parameter,
    take_step,
    values_of,
    weighted_sum,
)
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.runtime.current import current_agent
from farcall.testing.cluster import acting_as

STEPS = 20
TRAINERS = ("w1", "w2", "w3")
SIZES = (7, 4096)


def parameters() -> list[rpc.RRef[Any]]:
    return [rpc.remote("w0", make_parameter, args=(torch.zeros(size),)) for size in SIZES]


def train(optimizer: DistributedOptimizer, rrefs: list[rpc.RRef[Any]], gradient: float) -> None:
    for _ in range(STEPS):
        take_step(optimizer, rrefs, [torch.full((size,), gradient) for size in SIZES])


def train_together(
    rrefs: list[rpc.RRef[Any]], optimizers: list[DistributedOptimizer]
) -> list[torch.Tensor]:
    futures = [
        rpc.rpc_async(trainer, train, args=(optimizer, rrefs, 2.0**number))
        for number, (trainer, optimizer) in enumerate(zip(TRAINERS, optimizers, strict=True))
    ]
    torch.futures.wait_all(futures)
    return values_of(rrefs)


def assert_all(tensors: list[torch.Tensor], value: float) -> None:
    for tensor in tensors:
        assert tensor.unique().tolist() == [value]


def test_no_update_is_lost_when_trainers_share_an_optimizer(
    start: Callable[..., list[Agent]],
) -> None:
    start(4)
    rrefs = parameters()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
    values = train_together(rrefs, [optimizer] * 3)
    assert_all(values, -STEPS * (1.0 + 2.0 + 4.0))


def test_no_update_is_lost_when_each_trainer_has_an_optimizer(
    start: Callable[..., list[Agent]],
) -> None:
    """Update as PyTorch's parameter server tutorial does."""
    start(4)
    rrefs = parameters()
    optimizers = [DistributedOptimizer(optim.SGD, rrefs, lr=1.0) for _ in TRAINERS]
    values = train_together(rrefs, optimizers)
    assert_all(values, -STEPS * (1.0 + 2.0 + 4.0))


def test_momentum_is_shared_by_those_who_share_an_optimizer(
    start: Callable[..., list[Agent]],
) -> None:
    start(4)
    rrefs = parameters()
    optimizer = DistributedOptimizer(optim.Adam, rrefs, lr=1.0)
    train_together(rrefs, [optimizer] * 3)
    for state in optimizer.state_dict()["state"].values():
        assert state["step"] == 3 * STEPS


def test_hogwild_loses_no_whole_step(start: Callable[..., list[Agent]]) -> None:
    """Elements may be overwritten, but none is ever garbage: each update is some trainer's."""
    start(4)
    rrefs = parameters()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0, hogwild=True)
    values = train_together(rrefs, [optimizer] * 3)
    for value in values:
        assert (value == value.round()).all()
        assert (value <= -STEPS).all(), "less than one trainer's updates"
        assert (value >= -STEPS * 7.0).all(), "more than all updates"


class Meeting(Here):
    """A meeting point of two steps that go on at once."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.met: list[bool] = []
        self._patience = patience
        self._barrier = threading.Barrier(2)

    def come(self) -> None:
        try:
            self._barrier.wait(self._patience)
            self.met.append(True)
        except threading.BrokenBarrierError:
            self.met.append(False)


class Sociable(optim.SGD):
    """Waits for another in the middle of a step."""

    def step(self, closure: Any = None) -> Any:
        meeting = self.param_groups[0].get("meeting")
        if meeting is not None:
            meeting.come()
        return super().step(closure)


def steps_meet(
    optimizers: list[DistributedOptimizer],
    rrefs: list[rpc.RRef[Any]],
    patience: float,
    prepare: Callable[[], None] = lambda: None,
) -> bool:
    """Return whether steps of these optimizers, each of a trainer, go on at once.

    Each steps once before, so that its state is complete; then `prepare` is called.
    """
    meeting = Meeting(patience)
    agent = current_agent()

    def step(optimizer: DistributedOptimizer) -> None:
        with acting_as(agent):
            take_step(optimizer, rrefs, [torch.ones(2) for _ in rrefs])

    for optimizer in optimizers:
        step(optimizer)
    prepare()
    for optimizer in optimizers:
        optimizer.param_groups[0]["meeting"] = meeting
    with in_threads(*(partial(step, optimizer) for optimizer in optimizers)) as results:
        pass
    assert results == [None, None]
    assert len(meeting.met) == 2
    return all(meeting.met)


SOON = 0.3  # seconds that a step waits for one that must not come


def two_handles(optimizer: DistributedOptimizer) -> list[DistributedOptimizer]:
    return [rpc.rpc_sync("w0", echo, args=(optimizer,)) for _ in range(2)]


def test_steps_of_an_optimizer_are_one_after_the_other(pair: list[Agent]) -> None:
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(2),))]
    handles = two_handles(DistributedOptimizer(Sociable, rrefs, lr=1.0))
    assert not steps_meet(handles, rrefs, SOON)
    assert values_of(rrefs)[0].tolist() == [-4.0, -4.0]


def test_steps_of_two_optimizers_of_a_parameter_are_one_after_the_other(
    pair: list[Agent],
) -> None:
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(2),)) for _ in range(3)]
    optimizers = [
        DistributedOptimizer(Sociable, rrefs[:2], lr=1.0),
        DistributedOptimizer(Sociable, rrefs[1:], lr=1.0),
    ]
    assert not steps_meet(optimizers, rrefs, SOON)
    assert [value.tolist() for value in values_of(rrefs)] == [[-2.0] * 2, [-4.0] * 2, [-2.0] * 2]
    both = DistributedOptimizer(Sociable, rrefs, lr=1.0)
    assert not steps_meet([optimizers[0], both], rrefs, SOON)


def test_steps_of_optimizers_without_a_common_parameter_are_at_once(pair: list[Agent]) -> None:
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(2),)) for _ in range(2)]
    optimizers = [DistributedOptimizer(Sociable, [rref], lr=1.0) for rref in rrefs]
    assert steps_meet(optimizers, rrefs, PATIENCE)


def test_steps_are_at_once_in_hogwild(pair: list[Agent]) -> None:
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(2),))]
    handles = two_handles(DistributedOptimizer(Sociable, rrefs, lr=1.0, hogwild=True))
    assert steps_meet(handles, rrefs, PATIENCE)
    assert values_of(rrefs)[0].tolist() == [-4.0, -4.0]


def test_first_steps_are_one_after_the_other_in_hogwild(pair: list[Agent]) -> None:
    """Let one begin to fill the state first: the other would find it half made."""
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(2),)) for _ in range(2)]
    optimizer = DistributedOptimizer(Sociable, rrefs, lr=1.0, hogwild=True)
    empty = optimizer.state_dict()
    handles = two_handles(optimizer)
    assert not steps_meet(handles, rrefs, SOON, lambda: optimizer.load_state_dict(empty))
    # A parameter that had no gradient so far has no state either.
    optimizer = DistributedOptimizer(Sociable, rrefs, lr=1.0, hogwild=True)
    take_step(optimizer, rrefs[:1], [torch.ones(2)])
    meeting = Meeting(SOON)
    handles = two_handles(optimizer)
    agent = current_agent()

    def step(handle: DistributedOptimizer) -> None:
        with acting_as(agent):
            handle.param_groups[0]["meeting"] = meeting
            take_step(handle, rrefs, [torch.ones(2), torch.ones(2)])

    with in_threads(*(partial(step, handle) for handle in handles)):
        pass
    assert meeting.met == [False, False]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.Adam, {}),
        (optim.SGD, {"momentum": 0.9}),
        (optim.SGD, {}),
        (optim.Adagrad, {}),
        (optim.Rprop, {}),
    ],
)
def test_hogwild_alone_equals_one_process(
    trio: list[Agent], kind: Any, options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = DistributedOptimizer(kind, model.rrefs, lr=0.1, hogwild=True, **options)
    local = kind(model.here, lr=0.1, **options)
    for missing in ((1,), (0, 1), (), (2,), ()):
        model.step_both(optimizer, local, model.draw_gradients(missing))
        for each in (optimizer, local):
            each.param_groups[0]["lr"] *= 0.5
        model.check_equal()
    optimizer.add_param_group({"params": []})
    state = local.state_dict()
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


class Stepped:
    """Runs a step between a forward and a backward pass."""

    def __init__(self, hogwild: bool) -> None:
        self.rref = rpc.remote("w1", make_parameter, args=(torch.ones(2),))
        self.optimizer = DistributedOptimizer(optim.SGD, [self.rref], lr=1.0, hogwild=hogwild)

    def gradient(self) -> torch.Tensor:
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", squared, args=(self.rref,))
            with in_threads(self._step_elsewhere(current_agent())) as results:
                pass
            assert results == [None]
            dist_autograd.backward(context_id, [loss])
            found: torch.Tensor = rpc.rpc_sync("w1", context_gradient, args=(self.rref, context_id))
        return found

    def _step_elsewhere(self, agent: Agent) -> Callable[[], None]:
        def step() -> None:
            with acting_as(agent):
                take_step(self.optimizer, [self.rref], [torch.ones(2)])

        return step


def squared(rref: rpc.RRef[Any]) -> torch.Tensor:
    result: torch.Tensor = rref.local_value().pow(2).sum()
    return result


def test_step_between_anothers_forward_and_backward_is_noticed(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        Stepped(hogwild=False).gradient()


def test_step_between_anothers_forward_and_backward_is_allowed_in_hogwild(
    pair: list[Agent],
) -> None:
    assert Stepped(hogwild=True).gradient().tolist() == [0.0, 0.0]


def test_hyperparameters_change_in_the_order_in_which_they_were_set(pair: list[Agent]) -> None:
    """Step with one handle in many threads, while its rate changes."""
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    agent = current_agent()
    stop = threading.Event()

    def step() -> None:
        with acting_as(agent):
            while not stop.is_set():
                take_step(optimizer, [rref], [torch.zeros(2)])

    with in_threads(step, step, step):
        for number in range(50):
            optimizer.param_groups[0]["lr"] = float(number)
            take_step(optimizer, [rref], [torch.zeros(2)])
        stop.set()
    optimizer.refresh()
    assert optimizer.param_groups[0]["lr"] == 49.0


def test_local_backward_passes_of_the_owner_keep_their_gradients(pair: list[Agent]) -> None:
    """`.grad` belongs to them, while trainers step."""
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(512),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    agent = current_agent()

    def step() -> None:
        with acting_as(agent):
            for _ in range(STEPS):
                take_step(optimizer, [rref], [torch.full((512,), 5.0)])

    with in_threads(step):
        grads = rpc.rpc_sync("w1", local_passes, args=(rref, 100))
    assert grads == [100.0]
    assert rref.to_here().unique().tolist() == [-5.0 * STEPS]


def local_passes(rref: rpc.RRef[Any], count: int) -> list[float]:
    value = rref.local_value()
    for _ in range(count):
        weighted_sum(rref, torch.ones(512)).backward()
    found: list[float] = value.grad.unique().tolist()
    return found


@pytest.mark.parametrize("hogwild", [False, True])
def test_contexts_that_step_at_once_do_not_mix_their_gradients(
    pair: list[Agent], hogwild: bool
) -> None:
    """Give each of two parameters gradients of one thread's contexts only."""
    rrefs = [rpc.remote("w1", make_parameter, args=(torch.zeros(64),)) for _ in range(2)]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0, hogwild=hogwild)
    agent = current_agent()

    def step(mine: int) -> None:
        with acting_as(agent):
            for _ in range(STEPS):
                with dist_autograd.context() as context_id:
                    make_gradients(context_id, [rrefs[mine]], [torch.full((64,), 1.0 + mine)])
                    optimizer.step(context_id)

    with in_threads(lambda: step(0), lambda: step(1)) as results:
        pass
    assert results == [None, None]
    values = values_of(rrefs)
    assert values[0].unique().tolist() == [STEPS * -1.0]
    assert values[1].unique().tolist() == [STEPS * -2.0]


class Trainer:
    """Owns a parameter, and trains it with ever new rates."""

    def __init__(self) -> None:
        self.rref = rpc.RRef(torch.nn.Parameter(torch.zeros(2)))
        self.optimizer = DistributedOptimizer(optim.SGD, [self.rref], lr=1.0)

    def train(self, number: int) -> None:
        for step in range(STEPS):
            self.optimizer.param_groups[0]["lr"] = 1.0 + number + step
            take_step(self.optimizer, [self.rref], [torch.zeros(2)])


def test_handlers_that_wait_for_anothers_step_leave_it_room(
    start: Callable[..., list[Agent]],
) -> None:
    start(2, num_worker_threads=1)
    trainer = rpc.remote("w1", Trainer)
    futures = [trainer.rpc_async().train(number) for number in range(4)]
    assert torch.futures.wait_all(futures) == [None] * 4
