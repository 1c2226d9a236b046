"""PyTorch's "DDP + RPC" pattern: trainers average among themselves, and share a parameter server.

Two trainers run DistributedDataParallel modules over gloo between layers of worker `ps`. The
result is compared with one process that computes both trainers' losses with one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from crew import Crew, leave_all
from torch import distributed
from trainers import (
    TRAINERS,
    Group,
    begin_program,
    gradients,
    gradients_alone,
    layer,
    server_parameters,
    state,
    train,
    train_alone,
)

from farcall import autograd as dist_autograd

Gradients = list[torch.Tensor | None]


@pytest.fixture
def group(crew: Crew) -> Group:
    return Group(crew)


def check_equal(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> None:
    assert [one is None for one in actual] == [one is None for one in expected]
    for one, other in zip(actual, expected, strict=True):
        if one is not None and other is not None:
            assert one.layout is other.layout
            torch.testing.assert_close(one.to_dense(), other.to_dense())


def averaged(found: Sequence[Gradients]) -> Gradients:
    """Return the average over the trainers; a missing gradient counts as zero."""
    return [
        sum(one for one in parts if one is not None) / TRAINERS  # type: ignore[misc]
        if any(one is not None for one in parts)
        else None
        for parts in zip(*found, strict=True)
    ]


# Training.


def check_training(group: Group, kind: str, options: dict[str, Any], *more: Any) -> None:
    ours, theirs = train_alone(kind)
    for parameters in group.run(train, kind, options, *more):
        check_equal(parameters, ours)
    check_equal([parameter.detach() for parameter in group.server.run(server_parameters)], theirs)
    group.end()


@pytest.mark.parametrize(
    "kind", ["Program", "SeveralModules", "RemoteBetweenModules", "SparseReplica", "WholeModel"]
)
def test_training_equals_one_process(group: Group, kind: str) -> None:
    check_training(group, kind, {})


def test_training_of_which_each_trainer_uses_another_part(group: Group) -> None:
    check_training(group, "OtherBranches", {"find_unused_parameters": True})


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}, {"find_unused_parameters": True}],
    ids=str,
)
def test_training_with_options_of_ddp(group: Group, options: dict[str, Any]) -> None:
    check_training(group, "SeveralModules", options)


def test_training_with_the_distributed_optimizer(group: Group) -> None:
    check_training(group, "Program", {}, True)


# Gradients.


@pytest.mark.parametrize(
    ("passes", "is_averaged"),
    [
        (["no_sync"], False),
        (["forward"], False),
        (["no_sync", "no_sync"], False),
        ([""], True),
        (["no_sync", ""], True),
        (["no_sync", "no_sync", ""], True),
        (["", ""], True),
    ],
)
def test_no_sync_and_several_passes(group: Group, passes: list[str], is_averaged: bool) -> None:
    """Average in a pass what earlier ones left in the context, too."""
    alone = [gradients_alone("SeveralModules", rank, len(passes)) for rank in range(TRAINERS)]
    group.run(begin_program, "SeveralModules", {})
    for _ in range(2):
        found = group.run(gradients, passes)
        for rank in range(TRAINERS):
            check_equal(found[rank], averaged(alone) if is_averaged else alone[rank])
    group.end()


def test_modules_that_are_replicated_and_modules_that_are_not(group: Group) -> None:
    """Hook the leaves of both: each hook sees one trainer's gradient, once."""
    alone = [gradients_alone("PartlyReplicated", rank, 1) for rank in range(TRAINERS)]
    group.run(begin_program, "PartlyReplicated", {})
    found = group.run(gradients, [""])
    for rank in range(TRAINERS):
        half = len(alone[rank]) // 2
        check_equal(found[rank][:half], averaged(alone)[:half])
        check_equal(found[rank][half:], alone[rank][half:])
    group.end()


def local_and_distributed(rank: int) -> tuple[Gradients, Gradients, Gradients]:
    """Return a replica's gradients by `Tensor.backward`, by a context, and the former again."""
    module = torch.nn.parallel.DistributedDataParallel(layer(2))
    x = torch.full((3, 6), 1.0 + rank, dtype=torch.float64)
    found = []
    for kind in ("local", "distributed", "local"):
        module.zero_grad()
        if kind == "local":
            module(x).square().sum().backward()
            found.append([parameter.grad for parameter in module.parameters()])
        else:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [module(x).square().sum()])
                by_leaf = dist_autograd.get_gradients(context_id)
            found.append([by_leaf.get(parameter) for parameter in module.parameters()])
            assert all(parameter.grad is None for parameter in module.parameters())
    return found[0], found[1], found[2]


def test_replica_without_remote_parts_equals_tensor_backward(group: Group) -> None:
    first, second = group.run(local_and_distributed)
    for before, inside, after in (first, second):
        check_equal(inside, before)
        check_equal(after, before)
    check_equal(first[1], second[1])
    group.end()


def uneven(rank: int) -> list[Gradients]:
    """Gradients of each step, of which the second trainer has fewer."""
    (module,) = state["program"].replicas()
    with module.join():
        return [gradients(rank, [""], first) for first in range(3 if rank == 0 else 1)]


def test_uneven_inputs(group: Group) -> None:
    """Let a rank without more inputs take part with gradients of zero, as in PyTorch."""
    alone = [gradients_alone("Program", rank, 1) for rank in range(TRAINERS)]
    group.run(begin_program, "Program", {})
    first, second = group.run(uneven)
    check_equal(first[0], averaged(alone))
    check_equal(second[0], averaged(alone))
    for step in (1, 2):
        single = gradients_alone("Program", 0, 1, step)
        check_equal(first[step], [one / TRAINERS for one in single if one is not None])
    group.end()


def keep_grad(rank: int) -> bool:
    """Return whether a `.grad` that a user has set is as it was after a distributed pass."""
    module = torch.nn.parallel.DistributedDataParallel(layer(2))
    mine = [torch.full_like(parameter, 7.0) for parameter in module.parameters()]
    for parameter, grad in zip(module.parameters(), mine, strict=True):
        parameter.grad = grad
    with dist_autograd.context() as context_id:
        x = torch.ones(3, 6, dtype=torch.float64)
        dist_autograd.backward(context_id, [module(x).sum()])
    return all(
        parameter.grad is grad and bool((grad == 7).all())
        for parameter, grad in zip(module.parameters(), mine, strict=True)
    )


def test_grad_of_the_user_is_left_alone(group: Group) -> None:
    assert group.run(keep_grad) == [True, True]
    group.end()


def test_static_graph_is_right_or_an_error_that_says_so(group: Group) -> None:
    group.run(begin_program, "Program", {"static_graph": True})
    alone = [gradients_alone("Program", rank, 1) for rank in range(TRAINERS)]
    for rank, member in enumerate(group.trainers):
        member.start(gradients, rank, [""])
    for member in group.trainers:
        try:
            check_equal(member.result(), averaged(alone))
        except RuntimeError as error:
            if "static_graph" not in str(error):
                raise


# Deaths.


def test_sigkill_of_a_trainer_ends_the_average_of_the_other_in_an_error(group: Group) -> None:
    """gloo notices; and the server keeps serving."""
    first, second = group.trainers
    group.run(begin_program, "Program", {})
    first.start(gradients, 0, [""])
    second.kill()
    error = first.fails()
    assert isinstance(error, RuntimeError)
    first.run(begin_again)
    leave_all(first, group.server)


def begin_again() -> None:
    """Let trainer and server go on without replicas."""
    x = torch.ones(6, dtype=torch.float64, requires_grad=True)
    distributed.destroy_process_group()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(x * 2).sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full_like(x, 2.0))
