"""All schedulers of torch.optim.lr_scheduler work with the distributed optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from behaviour.optimizing import Model
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent

Make = Callable[[optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.1),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [1, 3], 0.1),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.5, total_steps=8),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 4, 2.0),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.Adam, {}),
]


def test_every_scheduler_of_torch_is_tested() -> None:
    assert set(lr.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Schedulers warn when they think that the optimizer has not stepped."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        # SequentialLR's own doing.
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")
        yield


def groups_of(items: list[Any]) -> list[dict[str, Any]]:
    return [{"params": items[:1], "lr": 0.3}, {"params": items[1:]}]


def advance(scheduler: Any, epoch: int) -> None:
    if isinstance(scheduler, lr.ReduceLROnPlateau):
        scheduler.step(float(epoch // 2))  # better every other time only
    else:
        scheduler.step()


def rates(optimizer: optim.Optimizer) -> list[Any]:
    return [(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_works_as_with_an_optimizer_of_torch(
    trio: list[Agent], name: str, kind: Any, options: dict[str, Any]
) -> None:
    model = Model()
    make = SCHEDULERS[name]
    optimizer = DistributedOptimizer(kind, groups_of(model.rrefs), lr=0.1, **options)
    local = kind(groups_of(model.here), lr=0.1, **options)
    schedulers = make(optimizer), make(local)
    seen = []
    for epoch in range(6):
        model.step_both(optimizer, local)
        for scheduler in schedulers:
            advance(scheduler, epoch)
        assert rates(optimizer) == rates(local)
        seen.append(rates(local))
    model.check_equal()
    assert any(rate != seen[0] for rate in seen), "the schedule changed nothing"


def test_scheduler_fills_a_rate_that_is_a_tensor(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs, lr=torch.tensor(0.1))
    local = optim.Adam(model.here, lr=torch.tensor(0.1))
    schedulers = lr.ExponentialLR(optimizer, 0.5), lr.ExponentialLR(local, 0.5)
    for _ in range(3):
        model.step_both(optimizer, local)
        for scheduler in schedulers:
            scheduler.step()
        model.check_equal()
    assert optimizer.param_groups[0]["lr"] == local.param_groups[0]["lr"]


def test_schedule_goes_on_after_a_restart(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1, momentum=0.9)
    local = optim.SGD(model.here, lr=0.1, momentum=0.9)
    schedulers = lr.StepLR(optimizer, 2), lr.StepLR(local, 2)
    for _ in range(3):
        model.step_both(optimizer, local)
        for scheduler in schedulers:
            scheduler.step()
    saved, schedule = optimizer.state_dict(), schedulers[0].state_dict()
    again = DistributedOptimizer(optim.SGD, model.rrefs, lr=5.0, momentum=0.5)
    resumed = lr.StepLR(again, 2)
    again.load_state_dict(saved)
    resumed.load_state_dict(schedule)
    for _ in range(3):
        model.step_both(again, local)
        resumed.step()
        schedulers[1].step()
        assert rates(again) == rates(local)
    model.check_equal()
