"""The distributed optimizer does what the same optimizer does in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from behaviour.helpers import Box, wait_until
from behaviour.optimizing import (
    Model,
    gradient_attribute,
    loss_with_gradients,
    make_gradients,
    make_parameter,
    take_step,
    values_of,
    weighted_sum,
)
from farcall import autograd as dist_autograd
from farcall import errors, rpc
from farcall.optim import FUNCTIONS, TYPES, DistributedOptimizer
from farcall.optim.owners import Owners
from farcall.rpc import Only
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

# Every class of torch.optim but LBFGS, which has tests of its own.
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adafactor, {}),
    (optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": torch.tensor(0.01), "amsgrad": True, "foreach": False}),
    (optim.Adam, {"lr": 0.01, "foreach": True, "maximize": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 1}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
]
SPARSE = [
    (optim.SparseAdam, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adagrad, {"lr": 0.1}),
]


def test_every_optimizer_of_torch_is_tested() -> None:
    classes = {value for value in vars(optim).values() if isinstance(value, type)}
    tested = {kind for kind, _ in (*OPTIMIZERS, *SPARSE)}
    tested |= {optim.Muon, optim.LBFGS}
    assert {c for c in classes if issubclass(c, optim.Optimizer)} - {optim.Optimizer} == tested


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_optimizer_of_torch_equals_itself_in_one_process(
    trio: list[Agent], kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = DistributedOptimizer(kind, model.rrefs, **options)
    local: Any = kind
    local = local(model.here, **options)
    for missing in ((), (1,), (), (0, 2), ()):
        model.step_both(optimizer, local, model.draw_gradients(missing))
        model.check_equal()


def test_muon_equals_itself_in_one_process(trio: list[Agent]) -> None:
    model = Model(shapes=((4, 3), (3, 5), (2, 2)))
    optimizer = DistributedOptimizer(optim.Muon, model.rrefs, lr=0.1)
    local = optim.Muon(model.here, lr=0.1)
    for _ in range(3):
        model.step_both(optimizer, local)
        model.check_equal()


@pytest.mark.parametrize(("kind", "options"), SPARSE)
def test_sparse_gradients_equal_those_in_one_process(
    trio: list[Agent], kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model(shapes=((6, 2), (5, 3)))
    optimizer = DistributedOptimizer(kind, model.rrefs, **options)
    local: Any = kind
    local = local(model.here, **options)
    for _ in range(3):
        model.step_both(optimizer, local, model.draw_sparse_gradients())
        model.check_equal()


def test_owner_of_parameters_may_call_step(trio: list[Agent]) -> None:
    model = Model(workers=("w0", "w1"))
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs, 0.1)
    local = optim.Adam(model.here, 0.1)
    for _ in range(2):
        model.step_both(optimizer, local)
    model.check_equal()


def test_references_made_by_the_owner_do_as_well(pair: list[Agent]) -> None:
    rrefs = rpc.rpc_sync("w1", parameters_of_linear)
    before = values_of(rrefs)
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
    take_step(optimizer, rrefs, [torch.ones(2, 3), torch.ones(2)])
    for old, new in zip(before, values_of(rrefs), strict=True):
        torch.testing.assert_close(new, old - 1)


def parameters_of_linear() -> list[rpc.RRef[torch.nn.Parameter]]:
    return [rpc.RRef(parameter) for parameter in torch.nn.Linear(3, 2).parameters()]


def test_tensor_that_is_no_parameter_is_optimized_too(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", torch.add, args=(torch.ones(2), 3))
    DistributedOptimizer(optim.SGD, [rref], lr=0.05)
    rref = rpc.remote("w1", torch.ones, args=(2,), kwargs={"requires_grad": True})
    take_step(DistributedOptimizer(optim.SGD, [rref], lr=0.5), [rref], [torch.ones(2)])
    assert rref.to_here().tolist() == [0.5, 0.5]


def test_owner_without_a_part_in_the_forward_pass_is_skipped(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    local = optim.SGD(model.here, lr=0.1)
    gradients = model.draw_gradients(missing=(1, 3))  # nothing of w2's
    model.step_both(optimizer, local, gradients)
    model.check_equal()


def test_step_outside_of_the_block_that_opened_the_context(trio: list[Agent]) -> None:
    """Step as from another thread: `acting_as` leaves the context, too."""
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    local = optim.SGD(model.here, lr=0.1)
    gradients = model.draw_gradients(missing=(1, 3))
    opened = dist_autograd.context()
    with opened as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        with acting_as(trio[0]), torch.no_grad():
            optimizer.step(context_id)
    model.set_gradients(gradients)
    local.step()
    model.check_equal()


def test_two_steps_in_one_context_apply_its_gradients_twice(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    with dist_autograd.context() as context_id:
        make_gradients(context_id, [rref], [torch.tensor([1.0, 2.0])])
        optimizer.step(context_id)
        optimizer.step(context_id)
    assert rref.to_here().tolist() == [-2.0, -4.0]


def set_grad(parameter: rpc.RRef[Any], value: torch.Tensor) -> None:
    parameter.local_value().grad = value


def test_grad_attribute_is_neither_read_nor_written(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    rpc.rpc_sync("w1", set_grad, args=(rref, torch.tensor([7.0, 7.0])))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    take_step(optimizer, [rref], [torch.ones(2)])
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)  # no gradients: nothing to do
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert rref.to_here().tolist() == [-1.0, -1.0]
    grad = rpc.rpc_sync("w1", gradient_attribute, args=(rref,))
    assert grad is not None
    assert grad.tolist() == [7.0, 7.0]


def watch_gradient(parameter: rpc.RRef[Any], context_id: int, deaths: Box) -> None:
    """Handler: `deaths` learns when the gradient is gone."""
    gradient = dist_autograd.get_gradients(context_id)[parameter.local_value()]
    weakref.finalize(gradient, deaths.put, "gradient")


@pytest.mark.parametrize("hogwild", [False, True])
def test_gradients_end_with_their_context(pair: list[Agent], hogwild: bool) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0, hogwild=hogwild)
    deaths = Box()
    for count in (1, 2, 3):
        with dist_autograd.context() as context_id:
            make_gradients(context_id, [rref], [torch.ones(2)])
            rpc.rpc_sync("w1", watch_gradient, args=(rref, context_id, deaths))
            optimizer.step(context_id)
        assert len(deaths.wait_for(count)) == count


def move(parameter: rpc.RRef[Any]) -> None:
    """Do to its parameters what `module.to(...)` does."""
    value = parameter.local_value()
    value.data = value.data.clone()


@pytest.mark.parametrize("hogwild", [False, True])
def test_parameter_whose_memory_was_replaced_is_followed(pair: list[Agent], hogwild: bool) -> None:
    model = Model(workers=("w1",))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1, momentum=0.9, hogwild=hogwild)
    local = optim.SGD(model.here, lr=0.1, momentum=0.9)
    for _ in range(3):
        model.step_both(optimizer, local)
        rpc.rpc_sync("w1", move, args=(model.rrefs[0],))
    model.check_equal()
    assert len(optimizer.state_dict()["state"]) == len(model.here)


def test_worker_with_a_policy_must_allow_it(start: Callable[..., list[Agent]]) -> None:
    only = Only([*FUNCTIONS, make_parameter, weighted_sum, optim.SGD], TYPES)
    start(2, policies={"w0": only, "w1": only})
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    take_step(optimizer, [rref], [torch.ones(2)])
    optimizer.load_state_dict(optimizer.state_dict())
    assert rref.to_here().tolist() == [-1.0, -1.0]


def test_worker_with_another_policy_refuses(start: Callable[..., list[Agent]]) -> None:
    start(2, policies={"w1": Only([make_parameter, optim.SGD])})
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    with pytest.raises(errors.Refused, match=r"'farcall\.optim\.part:build'"):
        DistributedOptimizer(optim.SGD, [rref], lr=1.0)


# Parameter groups.


def test_groups_have_hyperparameters_of_their_own(trio: list[Agent]) -> None:
    model = Model()
    # Both groups have parameters on both workers, and not in the order of the workers.
    groups = [{"params": [3, 2], "lr": 0.5}, {"params": [0, 1], "momentum": 0.9}]
    optimizer = DistributedOptimizer(optim.SGD, of(groups, model.rrefs), lr=0.1)
    local = optim.SGD(of(groups, model.here), lr=0.1)
    for _ in range(3):
        model.step_both(optimizer, local)
    model.check_equal()
    assert options(optimizer) == options(local)
    assert optimizer.param_groups[0]["params"] == [model.rrefs[3], model.rrefs[2]]
    assert optimizer.defaults == local.defaults


def of(groups: list[dict[str, Any]], items: list[Any]) -> list[dict[str, Any]]:
    """Groups of these items, given groups of their indices."""
    return [{**group, "params": [items[index] for index in group["params"]]} for group in groups]


def options(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def test_hyperparameters_that_change_go_with_the_next_step(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs, lr=torch.tensor(0.1))
    local = optim.Adam(model.here, lr=torch.tensor(0.1))
    for number in range(4):
        for each in (optimizer, local):
            group = each.param_groups[0]
            group["lr"].fill_(0.1 / (number + 1))
            group["betas"] = (0.9 / (number + 1), 0.99)
            group["note"] = [number]
        model.step_both(optimizer, local)
        model.check_equal()
    optimizer.param_groups[0]["note"].append("more")
    del optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    take_step(optimizer, model.rrefs, model.draw_gradients())
    optimizer.refresh()
    assert optimizer.param_groups[0]["note"] == [3, "more"]
    del optimizer.param_groups[0]["note"]
    take_step(optimizer, model.rrefs, model.draw_gradients())
    optimizer.refresh()
    assert "note" not in optimizer.param_groups[0]


def test_unchanged_hyperparameters_are_not_sent(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def note(self: Any, what: str, method: str, *args: Any) -> Any:
        sent.append((method, args[1:]))
        return call(self, what, method, *args)

    call = Owners.call
    monkeypatch.setattr(Owners, "call", note)
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    take_step(optimizer, model.rrefs, model.draw_gradients())
    optimizer.param_groups[0]["lr"] = 0.2
    take_step(optimizer, model.rrefs, model.draw_gradients())
    take_step(optimizer, model.rrefs, model.draw_gradients())
    assert sent == [("step", (None,)), ("step", ({0: ({"lr": 0.2}, ())},)), ("step", (None,))]


def test_groups_may_be_added_also_on_new_owners(trio: list[Agent]) -> None:
    model = Model(workers=("w1", "w2", "w0"))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs[:1], lr=0.1, momentum=0.9)
    local = optim.SGD(model.here[:1], lr=0.1, momentum=0.9)
    take_step(optimizer, model.rrefs[:1], [torch.ones(3, 2)])
    model.set_gradients([torch.ones(3, 2), None, None, None])
    local.step()
    optimizer.add_param_group({"params": model.rrefs[1:], "lr": 0.5})
    local.add_param_group({"params": model.here[1:], "lr": 0.5})
    for _ in range(2):
        model.step_both(optimizer, local)
    model.check_equal()
    assert options(optimizer) == options(local)
    state = optimizer.state_dict()
    assert state["param_groups"] == local.state_dict()["param_groups"]
    assert sorted(state["state"]) == [0, 1, 2, 3]


def test_names_of_parameters_are_kept(trio: list[Agent]) -> None:
    model = Model()
    names = ["a", "b", "c", "d"]
    named = list(zip(names, model.rrefs, strict=True))
    optimizer = DistributedOptimizer(optim.SGD, named, lr=0.1)
    local = optim.SGD(list(zip(names, model.here, strict=True)), lr=0.1)
    model.step_both(optimizer, local)
    model.check_equal()
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict() == local.state_dict()


def test_generators_of_references_and_single_references_in_groups(trio: list[Agent]) -> None:
    model = Model()
    groups = [{"params": model.rrefs[0]}, {"params": iter(model.rrefs[1:])}]
    optimizer = DistributedOptimizer(optim.SGD, iter(groups), lr=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    optimizer = DistributedOptimizer(optim.SGD, (rref for rref in model.rrefs), lr=0.1)
    local = optim.SGD(model.here, lr=0.1)
    model.step_both(optimizer, local)
    model.check_equal()


# Optimizers of users.


class Counting(optim.SGD):
    """Keeps a hyperparameter of its own, and state by index in a dict of its own."""

    def __init__(self, params: Any, lr: float = 0.1, every: int = 2) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["every"] = every
            group["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            if group["count"] % group["every"] == 0:
                for parameter in group["params"]:
                    parameter.grad = None
        return super().step(closure)


@pytest.mark.parametrize("hogwild", [False, True])
def test_optimizer_class_of_users_equals_itself_in_one_process(
    trio: list[Agent], hogwild: bool
) -> None:
    model = Model()
    optimizer = DistributedOptimizer(Counting, model.rrefs, 0.2, every=3, hogwild=hogwild)
    local = Counting(model.here, 0.2, every=3)
    for _ in range(7):
        model.step_both(optimizer, local)
        model.check_equal()
    assert optimizer.state_dict()["param_groups"] == local.state_dict()["param_groups"]
    optimizer.refresh()
    assert optimizer.param_groups[0]["count"] == 7


def test_optimizer_class_may_go_by_value(trio: list[Agent]) -> None:
    class Signs(optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad.sign())

    model = Model()
    optimizer = DistributedOptimizer(Signs, model.rrefs, lr=0.5)
    model.step_both(optimizer, Signs(model.here, lr=0.5))
    model.check_equal()


# Closures and hooks.


def test_closure_is_evaluated_in_a_context_of_its_own(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    local = optim.SGD(model.here, lr=0.1)
    gradients = model.draw_gradients()
    seen = []

    def closure(context_id: int) -> torch.Tensor:
        seen.append(context_id)
        loss = loss_with_gradients(model.rrefs, gradients)
        dist_autograd.backward(context_id, [loss])
        return loss

    with torch.no_grad():
        first = optimizer.step(closure)
    second = optimizer.step(closure=closure)
    assert first.requires_grad
    assert first > second
    for _ in range(2):
        model.set_gradients(gradients)
        local.step()
    model.check_equal()
    assert len(set(seen)) == 2
    for context_id in seen:
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            dist_autograd.get_gradients(context_id)


def test_hooks_of_the_step_run_around_it(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(rref.to_here().tolist()))
    optimizer.register_step_post_hook(lambda *_: seen.append(rref.to_here().tolist()))
    take_step(optimizer, [rref], [torch.ones(2)])
    assert seen == [[0.0, 0.0], [-1.0, -1.0]]


def test_hooks_for_all_optimizers_see_the_handle_and_the_parts(pair: list[Agent]) -> None:
    rrefs = [rpc.RRef(make_parameter(torch.zeros(2)))]
    rrefs.append(rpc.remote("w1", make_parameter, args=(torch.zeros(2),)))
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
    seen: list[str] = []
    hook = register_optimizer_step_post_hook(lambda it, *_: seen.append(type(it).__name__))
    try:
        take_step(optimizer, rrefs, [torch.ones(2)] * 2)
    finally:
        hook.remove()
    take_step(optimizer, rrefs, [torch.ones(2)] * 2)
    assert seen == ["SGD", "SGD", "DistributedOptimizer"]
    assert [rref.to_here().tolist() for rref in rrefs] == [[-2.0, -2.0]] * 2


def test_profiler_sees_steps(pair: list[Agent]) -> None:
    rref = rpc.RRef(make_parameter(torch.zeros(2)))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(optimizer, [rref], [torch.ones(2)])
    marks = {event.name for event in profile.events()}
    assert {"Optimizer.step#SGD.step", "Optimizer.step#DistributedOptimizer.step"} <= marks


def test_optimizer_class_of_the_users_own_may_replace_step(pair: list[Agent]) -> None:
    rref = rpc.RRef(make_parameter(torch.zeros(2)))
    optimizer = DistributedOptimizer(Twice, [rref], lr=1.0)
    take_step(optimizer, [rref], [torch.ones(2)])
    assert rref.local_value().tolist() == [-2.0, -2.0]


class Twice(optim.SGD):
    """Replaces the step of each object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        step = self.step
        self.step = lambda: (step(), step())[1]  # type: ignore[method-assign]


# The handle.


def step_with(optimizer: DistributedOptimizer, rrefs: list[Any], gradients: list[Any]) -> str:
    take_step(optimizer, rrefs, gradients)
    return repr(optimizer)


def test_handle_may_be_passed_to_other_workers(trio: list[Agent]) -> None:
    model = Model(workers=("w1",))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1, momentum=0.9)
    local = optim.SGD(model.here, lr=0.1, momentum=0.9)
    for worker in ("w1", "w2", "w0"):
        gradients = model.draw_gradients()
        shown = rpc.rpc_sync(worker, step_with, args=(optimizer, model.rrefs, gradients))
        assert shown == repr(optimizer)
        model.set_gradients(gradients)
        local.step()
    model.check_equal()
    model.step_both(optimizer, local)
    model.check_equal()


def set_rate(optimizer: DistributedOptimizer, rate: float, rrefs: list[Any]) -> None:
    optimizer.param_groups[0]["lr"] = rate
    take_step(optimizer, rrefs, [torch.zeros(2)])


def test_refresh_fetches_the_changes_of_other_handles(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    rpc.rpc_sync("w1", set_rate, args=(optimizer, 0.25, [rref]))
    assert optimizer.param_groups[0]["lr"] == 1.0
    take_step(optimizer, [rref], [torch.ones(2)])  # does not send the old value
    assert rref.to_here().tolist() == [-0.25, -0.25]
    optimizer.refresh()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_parts_end_with_the_last_handle(start: Callable[..., list[Agent]]) -> None:
    agents = start(2)
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    rref.to_here()
    owned = agents[1].references.statistics()["owned"]
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    assert agents[1].references.statistics()["owned"] == owned + 1
    del optimizer
    wait_until(lambda: agents[1].references.statistics()["owned"] == owned)


def test_handle_tells_what_it_is(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    assert repr(optimizer).startswith("DistributedOptimizer of SGD on 'w1', 'w2' (")
    assert "lr: 0.1" in repr(optimizer)
    assert isinstance(optimizer, optim.Optimizer)
    with pytest.raises(AttributeError, match="state_dict"):
        _ = optimizer.state


class Tuning(optim.SGD):
    """Changes a hyperparameter of its own in place."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if "history" in group:
                group["history"].append(group["lr"])
        return super().step(closure)


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_a_tensor_that_an_owner_changes_in_place_is_not_sent_back(
    pair: list[Agent], owner: str
) -> None:
    rref = rpc.remote(owner, make_parameter, args=(torch.zeros(2),))
    optimizer = DistributedOptimizer(Tuning, [rref], lr=1.0)
    optimizer.param_groups[0]["history"] = []
    for _ in range(3):
        take_step(optimizer, [rref], [torch.ones(2)])
    assert optimizer.param_groups[0]["history"] == []
    optimizer.refresh()
    assert optimizer.param_groups[0]["history"] == [1.0] * 3
