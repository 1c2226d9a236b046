"""Running the steps of a block, in a world that knows how to call other workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from simulator.gradients.ops import OPERATIONS, Site, values
from simulator.gradients.program import Await, Block, Call, Op, Program

Thing = Any  # a tensor, a reference, or None


class Bundle:
    """An object that carries values."""

    def __init__(self, things: Sequence[Thing]) -> None:
        self.things = list(things)


def pack(packing: str, things: Sequence[Thing]) -> Any:
    """Return the values in a container."""
    if packing == "list":
        return list(things)
    if packing == "dict":
        return {f"key{index}": thing for index, thing in enumerate(things)}
    if packing == "nested":
        return [things[0], {"rest": (list(things[1:]),)}] if things else []
    if packing == "object":
        return Bundle(things)
    return tuple(things)


def unpack(container: Any) -> list[Thing]:
    """Return the values in a container that `pack` made; a lone value is a container, too."""
    return list(_walk(container))


def _walk(container: Any) -> Iterator[Thing]:
    if isinstance(container, tuple | list):
        for part in container:
            yield from _walk(part)
    elif isinstance(container, dict):
        yield from _walk(list(container.values()))
    elif isinstance(container, Bundle):
        yield from _walk(container.things)
    else:
        yield container


class World(Protocol):
    """The surroundings of a block besides torch."""

    def call(self, site: Site, call: Call, args: Any) -> Any:
        """Have a block run. Returns an object to wait for, or a reference."""

    def wait(self, site: Site, pending: Any) -> Any:
        """Return the packed results of a call."""

    def refer(self, site: Site, value: Any) -> Any:
        """Return a reference to a value."""

    def fetch(self, site: Site, reference: Any) -> Any:
        """Return the value of a reference: itself on its owner, elsewhere a copy."""

    def settle(self, site: Site, reference: Any) -> None:
        """Wait until the value of a reference is there."""


class Frame:
    """A block that runs."""

    def __init__(
        self, world: World, program: Program, site: Site, block: Block, args: Sequence[Thing]
    ) -> None:
        self._world = world
        self._program = program
        self._site = site
        self._block = block
        self._things: dict[int, Thing] = dict(zip(block.params, args, strict=True))

    def __getitem__(self, number: int) -> Thing:
        return self._things[number]

    def run(self, start: int, stop: int) -> None:
        """Run the steps from `start` to before `stop`."""
        for step in self._block.steps[start:stop]:
            if isinstance(step, Op):
                self._operate(step)
            elif isinstance(step, Call):
                args = pack(step.packing, self._take(step.args))
                with grad_mode(step.quietly):
                    self._things[step.output] = self._world.call(self._site, step, args)
            else:
                self.arrived(step, self._world.wait(self._site, self._things[step.pending]))

    def arrived(self, step: Await, packed: Any) -> None:
        """Take the results of a call."""
        self._things.update(zip(step.outputs, unpack(packed), strict=True))

    def results(self) -> Any:
        """Return the results of the block."""
        return pack(self._block.packing, self._take(self._block.outputs))

    def root(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the root of these values."""
        things = self._take(numbers)
        if len(things) == 1 and things[0].ndim == 0 and not things[0].is_leaf:
            return things[0]  # type: ignore[no-any-return]
        weights = [
            values(thing.ndim, number) for thing, number in zip(things, numbers, strict=True)
        ]
        terms = [(thing * w).sum() for thing, w in zip(things, weights, strict=True)]
        return torch.stack(terms).sum()

    def _take(self, numbers: Iterable[int]) -> list[Thing]:
        return [self._things[number] for number in numbers]

    def _operate(self, step: Op) -> None:
        inputs = self._take(step.inputs)
        with grad_mode(step.quietly):
            outputs = self._results_of(step, inputs)
        self._things.update(zip(step.outputs, outputs, strict=True))

    def _results_of(self, step: Op, inputs: list[Thing]) -> Sequence[Thing]:
        world, site = self._world, self._site
        if step.name == "refer":
            return [world.refer(site, inputs[0])]
        if step.name == "fetch":
            return [unpack(world.fetch(site, inputs[0]))[step.number]]
        if step.name == "settle":
            world.settle(site, inputs[0])
            return []
        return OPERATIONS[step.name](site, inputs, step.number, name_of(step))


def grad_mode(quietly: bool) -> AbstractContextManager[Any]:
    """Return `torch.no_grad`, or a context that leaves the mode as it is."""
    return torch.no_grad() if quietly else nullcontext()


class Main:
    """Runs the main block from one backward pass to the next."""

    def __init__(self, frame: Frame, program: Program) -> None:
        self._frame = frame
        self._program = program
        self._done = 0

    def up_to(self, index: int) -> list[torch.Tensor]:
        """Run the steps before the backward pass of this index; its roots, the penalty excepted."""
        self._run_to(self._program.passes[index].after)
        return [self._frame.root(numbers) for numbers in self._program.passes[index].roots]

    def finish(self) -> None:
        """Run the steps that are left."""
        self._run_to(len(self._program.blocks[0].steps))

    def _run_to(self, stop: int) -> None:
        start, self._done = self._done, stop
        self._frame.run(start, stop)


def penalty(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of these."""
    squares = [(gradient**2).sum() for gradient in gradients]
    return torch.stack(squares).sum() if squares else torch.zeros(())


def name_of(step: Op) -> str:
    """Return the name under which a step counts."""
    return f"v{step.outputs[0]}" if step.outputs else f"{step.name} v{step.inputs[0]}"
