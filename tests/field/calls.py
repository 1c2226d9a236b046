"""Calls of every kind, with references and backward passes, and what a worker holds after them."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farcall import autograd, rpc
from farcall.runtime.current import current_agent

SIZE = 64  # elements of the tensors that backward passes go through
LARGE = 250_000  # elements of the tensor that has a shared-memory buffer of its own

BATCH = 20


class Amount(NamedTuple):
    """The calls, references and passes that a call of one kind makes, on all workers."""

    calls: int = 0
    references: int = 0
    passes: int = 0


AMOUNTS = {
    "echo": Amount(1),
    "tensor": Amount(1),
    "nested": Amount(3),
    "many": Amount(BATCH),
    "fails": Amount(1),
    "cancelled": Amount(1),
    "reference": Amount(2, 1),
    "lent": Amount(3, 1),
    "given": Amount(2, 1),
    "references": Amount(BATCH + 1, BATCH),
    "layer": Amount(1, 0, 1),
    "backward": Amount(4, 1, 1),
}

Timed = Callable[[str, Callable[[], Any]], Any]


def echo(value: Any) -> Any:
    return value


def nested(to: str, back: str, depth: int) -> int:
    return 0 if depth == 0 else rpc.rpc_sync(to, nested, args=(back, to, depth - 1))


def divide(number: int) -> float:
    return number / 0


def fetch(reference: Any) -> Any:
    return reference.to_here()


def give(value: Any) -> Any:
    return rpc.RRef(value)


def add_up(references: Sequence[Any]) -> int:
    return sum(reference.local_value() for reference in references)


def parameter(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SIZE, generator=generator, requires_grad=True)


def forward(weight: Any, inputs: torch.Tensor, onward: str) -> torch.Tensor:
    """Compute a layer whose activation is computed by a third worker."""
    return rpc.rpc_sync(onward, torch.sin, args=(inputs * weight.local_value(),))


def gradient_of(context: int, weight: Any) -> torch.Tensor:
    return autograd.get_gradients(context)[weight.local_value()]


def expected_gradients(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's gradients in one process: of the inputs and of the weight."""
    inputs, weight = parameter(seed), parameter(seed + 1)
    torch.sin(inputs * weight).sum().backward()
    assert inputs.grad is not None
    assert weight.grad is not None
    return inputs.grad, weight.grad


def _compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(found, expected), f"wrong gradient {found}, not {expected}"


class Load:
    """One thread's calls.

    Args:
        others: the workers that are called.
        seed: of the choices by chance.
        timed: makes a call, given a name for its kind and a function. Each has its own deadline.
        timeout: seconds, of each call. That of a backward pass is the agent's `rpc_timeout`.
    """

    def __init__(self, others: Sequence[str], seed: int, timed: Timed, timeout: float) -> None:
        self.random = random.Random(seed)
        self._others = others
        self._timed = timed
        self._timeout = timeout

    def make(self, kind: str) -> None:
        """Make the calls of one kind. Raises AssertionError if a result is wrong."""
        to, other = self.random.sample(self._others, 2)
        getattr(self, f"_{kind}")(to, other)

    def _echo(self, to: str, other: str) -> None:
        assert self._sync("echo", to, echo, 1) == 1

    def _tensor(self, to: str, other: str) -> None:
        value = torch.ones(LARGE)
        back = self._timed(
            "tensor", lambda: rpc.rpc_async(to, echo, (value,), timeout=self._timeout).wait()
        )
        assert back[-1] == 1

    def _nested(self, to: str, other: str) -> None:
        assert self._sync("nested", to, nested, other, to, 2) == 0

    def _many(self, to: str, other: str) -> None:
        def call() -> list[int]:
            futures = [
                rpc.rpc_async(to, echo, args=(number,), timeout=self._timeout)
                for number in range(BATCH)
            ]
            return [future.wait() for future in futures]

        assert self._timed("many", call) == [*range(BATCH)]

    def _fails(self, to: str, other: str) -> None:
        try:
            self._sync("fails", to, divide, 1)
        except ZeroDivisionError:
            return
        raise AssertionError("no error of the function")

    def _cancelled(self, to: str, other: str) -> None:
        def call() -> Any:
            future = rpc.rpc_async(to, echo, args=(2,), timeout=self._timeout)
            future.cancel()
            return future.wait()

        with contextlib.suppress(rpc.Cancelled):
            assert self._timed("cancelled", call) == 2

    def _reference(self, to: str, other: str) -> None:
        made = self._remote(to, echo, 3)
        assert self._timed("to_here", lambda: made.to_here(timeout=self._timeout)) == 3

    def _lent(self, to: str, other: str) -> None:
        assert self._sync("lent", other, fetch, self._remote(to, echo, 4)) == 4

    def _given(self, to: str, other: str) -> None:
        given = self._sync("given", to, give, 5)
        assert self._timed("to_here", lambda: given.to_here(timeout=self._timeout)) == 5

    def _references(self, to: str, other: str) -> None:
        def call() -> int:
            made = [
                rpc.remote(to, echo, args=(number,), timeout=self._timeout)
                for number in range(BATCH)
            ]
            return int(rpc.rpc_sync(to, add_up, args=(made,), timeout=self._timeout))

        assert self._timed("references", call) == sum(range(BATCH))

    def _layer(self, to: str, other: str) -> None:
        inputs = parameter(self.random.randrange(1 << 30))
        with autograd.context() as context:
            outputs = self._sync("layer", to, torch.sin, inputs)
            self._timed("backward", lambda: autograd.backward(context, [outputs.sum()]))
            _compare(autograd.get_gradients(context)[inputs], torch.cos(inputs))

    def _backward(self, to: str, other: str) -> None:
        seed = self.random.randrange(1 << 30)
        inputs, weight = parameter(seed), self._remote(to, parameter, seed + 1)
        expected, expected_there = expected_gradients(seed)
        with autograd.context() as context:
            outputs = self._sync("forward", to, forward, weight, inputs, other)
            self._timed("backward", lambda: autograd.backward(context, [outputs.sum()]))
            _compare(autograd.get_gradients(context)[inputs], expected)
            _compare(self._sync("gradients", to, gradient_of, context, weight), expected_there)

    def _sync(self, kind: str, to: str, function: Any, *args: Any) -> Any:
        return self._timed(
            kind, lambda: rpc.rpc_sync(to, function, args=args, timeout=self._timeout)
        )

    def _remote(self, to: str, function: Any, *args: Any) -> Any:
        return self._timed(
            "remote", lambda: rpc.remote(to, function, args=args, timeout=self._timeout)
        )


def held() -> dict[str, int]:
    """References, values, calls, contexts and passes that are still known here."""
    agent = current_agent()
    found = {
        **agent.references.statistics(),
        "values": len(agent.references._values),
        "running calls": agent.coordinator.active,
        "contexts": len(agent.gradients),
        "passes": agent.gradients.passes(),
    }
    return {what: count for what, count in found.items() if count}


def drain(patience: float = 30.0) -> dict[str, int]:
    """Wait until nothing is held any more; return the rest that is held all the same."""
    end = time.monotonic() + patience
    while (left := held()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return left
