"""The rules of autograd contexts, and what bad input to their functions raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import DistributedRun, Run, check_same, doubles, times, weights
from behaviour.helpers import Box, Gate, in_threads, wait_until
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.autograd.autograd import Autograd
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def has_failed(agent: Agent, context_id: int) -> bool:
    """Return whether the worker knows of a pass in the context that has failed."""
    assert isinstance(agent.gradients, Autograd)
    known = agent.gradients.get(context_id)
    assert known is not None
    return any(backward.error is not None for backward in known.passes.values())


def knows(agent: Agent, context_id: int) -> bool:
    """Return whether the worker knows the context."""
    with acting_as(agent):
        try:
            dist_autograd.get_gradients(context_id)
        except RuntimeError as error:
            if str(error).startswith(f"Could not find autograd context with id: {context_id}"):
                return False
            raise
    return True


# Life of a context.


def test_ids_are_integers_that_differ_between_workers_and_contexts(trio: list[Agent]) -> None:
    ids = []
    for agent in trio * 3:
        with acting_as(agent), dist_autograd.context() as context_id:
            assert type(context_id) is int
            ids.append(context_id)
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 0


def test_new_context_has_no_gradients(pair: list[Agent]) -> None:
    with dist_autograd.context() as context_id:
        assert dist_autograd.get_gradients(context_id) == {}


def test_nested_context(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        h = run.call("w1", times, run, "w", run["x"])
        with (
            pytest.raises(
                RuntimeError, match="Already have an autograd context id for this thread"
            ),
            dist_autograd.context(),
        ):
            pass
        run.backward(run.call("w1", times, run, "w", h).sum())  # the outer one goes on
        check_same(run.gradient("x"), run["w"].detach() ** 2, "gradient")


def open_context() -> int:
    with dist_autograd.context() as context_id:
        return context_id


def test_nested_context_in_a_callee(pair: list[Agent]) -> None:
    with (
        dist_autograd.context(),
        pytest.raises(RuntimeError, match="Already have an autograd context id"),
    ):
        rpc.rpc_sync("w1", open_context)
    assert rpc.rpc_sync("w1", open_context) != 0


def test_contexts_one_after_another(pair: list[Agent]) -> None:
    first, second = open_context(), open_context()
    assert first != second
    assert not knows(pair[0], first)


def test_context_ends_with_an_error(pair: list[Agent]) -> None:
    with pytest.raises(KeyError, match="planted"), dist_autograd.context() as context_id:
        raise KeyError("planted")
    assert not knows(pair[0], context_id)
    open_context()


def test_context_ends_on_all_workers(trio: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", a="w1", b="w2")
        run.backward(run.call("w1", forward_to, run, "w2", run["x"]).sum())
        assert all(knows(agent, run.context_id) for agent in trio)
    assert not knows(trio[0], run.context_id)
    wait_until(lambda: not any(knows(agent, run.context_id) for agent in trio))


def forward_to(run: Run, to: str, x: torch.Tensor) -> torch.Tensor:
    return run.call(to, times, run, "b", x * run["a"])


def test_call_without_tensors_carries_the_context(trio: list[Agent]) -> None:
    """Make the callee's results of such a call part of the context."""
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, b="w2")
        run.backward(run.call("w1", without_tensors, run).sum())
        with acting_as(trio[2]):
            assert set(dist_autograd.get_gradients(run.context_id)) == {run["b"]}


def without_tensors(run: Run) -> torch.Tensor:
    return run.call("w2", times, run, "b", torch.ones(4, dtype=torch.float64))


def test_get_gradients_in_a_handler_that_gets_the_id(pair: list[Agent]) -> None:
    run, box = DistributedRun(), Box()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        run.backward(run.call("w1", times, run, "w", run["x"]).sum())
        rpc.rpc_sync("w1", put_gradients, args=(box, run.context_id))
        (gradients,) = box.things
        assert list(gradients) == [run["w"]]
        assert torch.equal(gradients[run["w"]], run["x"])
        # Also from outside of the context, and by a call to oneself.
        rpc.rpc_sync("w0", put_gradients, args=(box, run.context_id))
        assert list(box.things[1]) == [run["x"]]


def put_gradients(box: Box, context_id: int) -> None:
    box.put(dist_autograd.get_gradients(context_id))


def test_changing_the_dict_of_gradients_changes_nothing(pair: list[Agent]) -> None:
    x = doubles(3).requires_grad_()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [x.sum()])
        dist_autograd.get_gradients(context_id).clear()
        assert list(dist_autograd.get_gradients(context_id)) == [x]


def test_context_is_that_of_its_thread_only(pair: list[Agent]) -> None:
    def in_another_thread() -> Any:
        with acting_as(pair[0]):
            received = rpc.rpc_sync("w1", torch.add, args=(x, 1))
            with dist_autograd.context() as other:
                return received, other

    x = doubles(3).requires_grad_()
    with dist_autograd.context() as context_id:
        with in_threads(in_another_thread) as results:
            pass
        received, other = results[0]
        assert other != context_id
        assert received.is_leaf
        assert dist_autograd.get_gradients(context_id) == {}


def test_calls_outside_of_a_context_are_not_linked(pair: list[Agent]) -> None:
    x = doubles(3).requires_grad_()
    received = rpc.rpc_sync("w1", torch.sin, args=(x,))
    assert received.requires_grad
    assert received.is_leaf
    received.sum().backward()
    assert received.grad is not None
    assert x.grad is None
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(received**2).sum()])
        assert list(dist_autograd.get_gradients(context_id)) == [received]


def test_answer_that_arrives_after_the_end_is_not_linked(pair: list[Agent], gate: Gate) -> None:
    """Revive nothing, here or there."""
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    with dist_autograd.context() as run.context_id:
        future = rpc.rpc_async("w1", after_gate, args=(gate, run, run["x"]))
        gate.wait_for_arrivals()
    wait_until(lambda: not knows(pair[1], run.context_id))
    gate.open()
    answer = future.wait()
    assert not any(knows(agent, run.context_id) for agent in pair)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        run.backward(answer.sum())
    assert run["w"].grad is None


def after_gate(gate: Gate, run: Run, x: torch.Tensor) -> torch.Tensor:
    gate.wait()
    return times(run, "w", x)


def test_nested_call_after_the_end_revives_nothing(trio: list[Agent], gate: Gate) -> None:
    run = DistributedRun()
    weights(run, x="w0", a="w1", b="w2")
    with dist_autograd.context() as run.context_id:
        future = rpc.rpc_async("w1", nested_after_gate, args=(gate, run, run["x"]))
        gate.wait_for_arrivals()
    wait_until(lambda: not knows(trio[1], run.context_id))
    gate.open()
    check_same(future.wait(), run["x"] * run["a"] * run["b"], "the answer")
    assert not any(knows(agent, run.context_id) for agent in trio)


def nested_after_gate(gate: Gate, run: Run, x: torch.Tensor) -> torch.Tensor:
    gate.wait()
    return run.call("w2", times, run, "b", x * run["a"])


def test_tensor_of_one_context_is_no_part_of_another(pair: list[Agent]) -> None:
    """Give no wrong gradients: the graph belongs to the first context, which may have ended."""
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", times, run, "w", run["x"])
    with dist_autograd.context() as run.context_id, pytest.raises(RuntimeError, match="context"):
        run.backward((h * run["x"]).sum())


def test_many_contexts(pair: list[Agent]) -> None:
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    for _ in range(200):
        with dist_autograd.context() as run.context_id:
            run.backward(run.call("w1", times, run, "w", run["x"]).sum())
            check_same(run.gradient("x"), run["w"].detach(), "gradient")


def test_shutdown_inside_of_a_context(start: Callable[..., list[Agent]]) -> None:
    agents = start(2)
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    with dist_autograd.context() as run.context_id:
        run.call("w1", times, run, "w", run["x"])
        agents[0].close()
    assert agents[0].status.is_closed


# Workers that are lost.


def double_at_the_root(run: Run, x: torch.Tensor) -> None:
    run.note("root", (x * 2).sum())


def give_to_the_root(run: Run, x: torch.Tensor) -> None:
    run.call("w0", double_at_the_root, run, x * run["c"])


def test_creator_hears_of_a_failure_though_the_giver_of_the_roots_context_is_lost(
    trio: list[Agent],
) -> None:  # BWD-6
    root, creator, giver = trio
    run = DistributedRun()
    weights(run, b="w1", c="w2")
    with acting_as(creator), dist_autograd.context() as run.context_id:
        run.call("w2", give_to_the_root, run, run["b"])
        giver.close()
        assert isinstance(creator.gradients, Autograd)
        known_to = creator.gradients.known_to
        wait_until(lambda: root.me.incarnation in known_to(run.context_id))  # it has reported
        with acting_as(root), pytest.raises(rpc.PeerLost):
            dist_autograd.backward(run.context_id, [run.noted["root"]])
        wait_until(lambda: has_failed(creator, run.context_id))


# Bad input.


@pytest.mark.parametrize("context_id", [0, 100, -1, 2**62, 2**80])
def test_unknown_context(pair: list[Agent], context_id: int) -> None:
    message = f"Could not find autograd context with id: {context_id}"
    root = doubles(3).requires_grad_().sum()
    with pytest.raises(RuntimeError, match=message):
        dist_autograd.get_gradients(context_id)
    with pytest.raises(RuntimeError, match=message):
        dist_autograd.backward(context_id, [root])
    with pytest.raises(RuntimeError, match=message):
        rpc.rpc_sync("w1", dist_autograd.get_gradients, args=(context_id,))


def test_backward_after_the_context_ended(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        root = run.call("w1", times, run, "w", run["x"]).sum()
    with pytest.raises(RuntimeError, match=f"autograd context with id: {run.context_id}"):
        run.backward(root)


@pytest.mark.parametrize("context_id", [None, "1", 1.5, [1], True])
def test_context_id_of_the_wrong_type(pair: list[Agent], context_id: Any) -> None:
    root = doubles(3).requires_grad_().sum()
    with pytest.raises(TypeError, match="context"):
        dist_autograd.backward(context_id, [root])
    with pytest.raises(TypeError, match="context"):
        dist_autograd.get_gradients(context_id)


LEAF = doubles(3).requires_grad_()

BAD_ROOTS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, TypeError, "incompatible function arguments"),
    "empty": ([], RuntimeError, "No tensors provided for gradient computation."),
    "no tensor": ([1.0], TypeError, "incompatible function arguments"),
    "one no tensor": ([LEAF.sum(), "x"], TypeError, "root 1"),
    "no scalar": ([LEAF * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
    "one no scalar": ([LEAF.sum(), LEAF * 2], RuntimeError, "root 1.* is not a scalar"),
    "plain": ([torch.zeros(())], RuntimeError, "requires_grad not set on"),
    "plain says why": (
        [torch.zeros(())],
        RuntimeError,
        "does not require grad and does not have a grad_fn",
    ),
    "one plain": ([LEAF.sum(), torch.zeros(())], RuntimeError, "root 1"),
    "a leaf": (
        [torch.ones(1, requires_grad=True)],
        RuntimeError,
        "does not have a valid gradient function",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROOTS)
def test_bad_roots(pair: list[Agent], kind: str) -> None:
    roots, error, message = BAD_ROOTS[kind]
    with dist_autograd.context() as context_id:
        with pytest.raises(error, match=message):
            dist_autograd.backward(context_id, roots)
        assert dist_autograd.get_gradients(context_id) == {}
        dist_autograd.backward(context_id, [LEAF.sum()])
        assert list(dist_autograd.get_gradients(context_id)) == [LEAF]


def test_roots_may_be_a_tuple_and_have_one_element_in_any_shape(pair: list[Agent]) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, (LEAF.sum().view(1, 1),))
        assert torch.equal(dist_autograd.get_gradients(context_id)[LEAF], torch.ones_like(LEAF))


# `Tensor.backward` through what arrived.


def test_tensor_backward_says_what_to_use_instead(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        h = run.call("w1", times, run, "w", run["x"])
        with pytest.raises(RuntimeError, match=r"autograd\.backward"):
            (h * run["x"]).sum().backward()
        h = run.call("w1", times, run, "w", run["x"])
        run.backward(h.sum())
        check_same(run.gradient("x"), run["w"].detach(), "gradient")


def test_tensor_backward_in_a_callee_says_what_to_use_instead(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0")
        with pytest.raises(RuntimeError, match=r"autograd\.backward"):
            run.call("w1", backward_locally, run["x"])


def backward_locally(x: torch.Tensor) -> None:
    x.sum().backward()


def test_tensor_backward_of_a_tensor_that_does_not_depend_on_an_arrival(pair: list[Agent]) -> None:
    x = doubles(3).requires_grad_()
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("w1", torch.sin, args=(x,))
        (x * 2).sum().backward()
        assert dist_autograd.get_gradients(context_id) == {}
    assert x.grad is not None


def test_gradient_by_an_arrived_tensor_is_torchs_own_affair(pair: list[Agent]) -> None:
    x = doubles(3).requires_grad_()
    with dist_autograd.context():
        h = rpc.rpc_sync("w1", torch.sin, args=(x,))
        (gradient,) = torch.autograd.grad((h**2).sum(), h)
        assert torch.equal(gradient, 2 * h.detach())


def test_a_thread_that_ends_leaves_no_context_behind(pair: list[Agent]) -> None:
    """Leave no context in a worker's threads, which serve other calls later."""
    for _ in range(50):
        with dist_autograd.context():
            rpc.rpc_sync("w1", torch.sin, args=(LEAF,))
        assert rpc.rpc_sync("w1", torch.sin, args=(LEAF,)).is_leaf
        assert rpc.rpc_async("w1", torch.sin, args=(LEAF,)).wait().is_leaf
        assert rpc.remote("w1", torch.sin, args=(LEAF,)).to_here().is_leaf
