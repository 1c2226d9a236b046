"""Random programs, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from simulator.gradients import draw_ops
from simulator.gradients.program import (
    ASYNC,
    MAX_WORKERS,
    METHOD_ASYNC,
    METHOD_REMOTE,
    METHOD_SYNC,
    PACKINGS,
    REMOTE,
    REMOTE_WAYS,
    SYNC,
    Await,
    Block,
    Call,
    Leaf,
    Op,
    Pass,
    Program,
)
from simulator.gradients.scope import Reference, Results, Scope, Value

T = TypeVar("T")

_HOOKS = ("", "", "", "look", "halve", "squash", "clamp")
_WAYS = (SYNC, SYNC, SYNC, ASYNC, ASYNC, ASYNC, REMOTE, REMOTE)
_METHOD_WAYS = (METHOD_SYNC, METHOD_ASYNC, METHOD_REMOTE)
_QUIET = 0.05  # of the calls and of the backward passes are made under no_grad


def generate(
    seed: int, *, leaves: Sequence[Leaf] | None = None, workers: int | None = None
) -> Program:
    """Return a random program.

    Args:
        seed: equal arguments give equal programs.
        leaves: its parameters, to be shared with other programs; drawn when None.
        workers: how many; drawn (2 to 4) when None.
    """
    return _Generator(seed, leaves, workers).run()


def draw_leaves(seed: int, workers: int) -> tuple[Leaf, ...]:
    """Random parameters: one to eight, the number drawn too."""
    random = Random(f"leaves {seed}")
    return tuple(
        Leaf(random.randrange(workers), random.choice((0, 1, 2, 2)), random.choice(_HOOKS))
        for _ in range(random.randint(1, 8))
    )


class _Generator:
    def __init__(self, seed: int, leaves: Sequence[Leaf] | None, workers: int | None) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.workers = workers or self.random.randint(2, MAX_WORKERS)
        self.leaves = draw_leaves(seed, self.workers) if leaves is None else tuple(leaves)
        self.budget = self.random.choice((8, 15, 25, 40, 60))
        self.depth = self.random.randint(1, 5)
        self.calls = self.random.uniform(0.1, 0.6)
        self.tidy = self.random.random() < 0.35  # everything that requires grad is used
        self.plan = self.random.choice(_PLANS)
        self.operations = draw_ops.mix(self.random, without=self._excluded())
        self.numbers = 0
        self.slots = 0
        self.blocks: list[Block | None] = []

    def run(self) -> Program:
        self.blocks.append(None)
        main = Scope(self.random.randrange(self.workers), 0, {})
        if self.random.random() < 0.5:
            draw_ops.parameter(self, main)
        self._steps(main, self.budget)
        if self.random.random() < 0.8:
            self._settle(main)
        passes = tuple(
            one._replace(quietly=self.random.random() < _QUIET) for one in self.plan(self, main)
        )
        self._settle(main)
        self.blocks[0] = Block(main.worker, (), tuple(main.steps), ())
        blocks = tuple(block for block in self.blocks if block is not None)
        return Program(self.seed, self.workers, self.leaves, blocks, passes)

    def _excluded(self) -> Sequence[draw_ops.Draw]:
        """Operations that the plan can't have."""
        if self.plan is _Generator._penalty:  # sparse and undefined gradients have no gradient
            return (draw_ops.embed, draw_ops.half_blind)
        if self.plan is _Generator._at_once:  # torch adds to `.grad` without a lock
            return (draw_ops.retain,)
        return ()

    # Numbers and choices.

    def number(self) -> int:
        """Return a number for a new value."""
        self.numbers += 1
        return self.numbers

    def slot(self) -> int:
        """Return a slot for a new stored value."""
        self.slots += 1
        return self.slots

    def pick(self, options: Sequence[T]) -> T:
        """Return one of these; rather a late one, so that programs get deep."""
        if self.random.random() < 0.5:
            options = options[-4:]
        return self.random.choice(options)

    # Blocks.

    def _steps(self, scope: Scope, most: int) -> None:
        """Draw up to `most` steps, nested ones included."""
        end = self.budget - most
        while self.budget > max(end, 0):
            self.budget -= 1
            self._step(scope)

    def _step(self, scope: Scope) -> None:
        draw = self.random.random
        if scope.depth < self.depth and draw() < self.calls:
            self._call(scope)
        elif scope.pending and draw() < 0.4:
            self._await(scope, self.random.randrange(len(scope.pending)))
        elif scope.references and draw() < 0.4:
            reference = self.random.choice(scope.references)
            if reference.content:
                self._fetch(scope, reference, self.random.randrange(len(reference.content)))
        elif scope.tensors and draw() < 0.05:
            self._refer(scope)
        else:
            draw_ops.draw(self, scope)

    def _call(self, scope: Scope) -> None:
        if self.random.random() < 0.75:
            way = self.random.choice(_WAYS)
        else:
            way = self.random.choice(_METHOD_WAYS)
        args = self._things(scope, (0, 1, 1, 2, 2, 3))
        quietly = self.random.random() < _QUIET
        index, callee = self._block(scope, args, quietly)
        number = self.number()
        packing = self.random.choice(PACKINGS)
        numbers = tuple(arg.number for arg in args)
        scope.steps.append(Call(way, index, numbers, packing, number, quietly))
        inside, content = callee
        if way in REMOTE_WAYS:
            reference = Reference(number, inside.worker, content, inside.slots)
            scope.references.append(reference)
            scope.unsettled.append(reference)
            scope.made.append(reference)
        else:
            scope.pending.append(Results(number, content, inside.slots))
            if way in (SYNC, METHOD_SYNC):
                self._await(scope, -1)

    def _block(
        self, caller: Scope, args: Sequence[Value | Reference], quietly: bool
    ) -> tuple[int, tuple[Scope, tuple[Value | Reference, ...]]]:
        """Draw a function that takes these; its index, its scope and what it returns."""
        index = len(self.blocks)
        self.blocks.append(None)
        quiet = caller.quiet or quietly
        scope = Scope(self._callee(caller), caller.depth + 1, caller.slots, quiet)
        params = tuple(self.number() for _ in args)
        scope.arrive(args, params)
        if self.random.random() < 0.5:
            draw_ops.parameter(self, scope)
        self._steps(scope, min(self.random.randint(1, 8), self.budget))
        self._settle(scope)
        outputs = self._things(scope, (0, 1, 1, 1, 2, 3))
        if self.tidy:
            outputs += self._gather(scope)
        numbers = tuple(thing.number for thing in outputs)
        packing = self.random.choice(PACKINGS)
        steps, split = tuple(scope.steps), self._split(scope)
        self.blocks[index] = Block(scope.worker, params, steps, numbers, packing, split)
        return index, (scope, outputs)

    def _things(self, scope: Scope, counts: Sequence[int]) -> tuple[Value | Reference, ...]:
        """Arguments or results: mostly tensors."""
        count = self.random.choice(counts)
        options: list[Value | Reference] = [*scope.references[-2:], *scope.tensors]
        if not options:
            return ()
        things: list[Value | Reference] = []
        for _ in range(count):
            if scope.tensors and self.random.random() < 0.6:
                things.append(self._deep(scope.tensors))
            else:
                things.append(self.pick(options))
        return tuple(things)

    def _deep(self, tensors: Sequence[Value]) -> Value:
        """Return a value that depends on many others."""
        return max(self.random.choices(tensors, k=3), key=lambda value: value.depth)

    def _gather(self, scope: Scope) -> tuple[Value, ...]:
        """Make a tensor of all that was not used so far, also of references that were made here."""
        for reference in scope.made:
            for index in range(len(reference.content)):
                self._fetch(scope, reference, index)
        gathered = draw_ops.gather(self, scope)
        return () if gathered is None else (gathered,)

    def _callee(self, caller: Scope) -> int:
        """Seldom the caller itself."""
        others = [worker for worker in range(self.workers) if worker != caller.worker]
        return caller.worker if self.random.random() < 0.08 else self.random.choice(others)

    def _split(self, scope: Scope) -> int:
        if self.random.random() < 0.75:
            return -1
        calls = {step.output: step.way for step in scope.steps if isinstance(step, Call)}
        waits = [
            position
            for position, step in enumerate(scope.steps)
            if isinstance(step, Await) and calls[step.pending] in (ASYNC, METHOD_ASYNC)
        ]
        return self.random.choice(waits) if waits else -2

    def _await(self, scope: Scope, position: int) -> None:
        results = scope.pending.pop(position)
        scope.slots.update(results.slots)
        numbers = tuple(self.number() for _ in results.content)
        scope.arrive(results.content, numbers)
        scope.steps.append(Await(results.number, numbers))

    def _settle(self, scope: Scope) -> None:
        """Wait for all pending calls: a program has nothing left running at its end."""
        while scope.pending:
            self._await(scope, self.random.randrange(len(scope.pending)))
        for reference in scope.unsettled:
            scope.steps.append(Op("settle", (reference.number,), ()))
            scope.slots.update(reference.slots)
        scope.unsettled.clear()

    # References.

    def _fetch(self, scope: Scope, reference: Reference, index: int) -> None:
        thing, number = reference.content[index], self.number()
        if isinstance(thing, Value) and reference.owner == scope.worker:
            scope.see(thing, number)
        else:
            scope.arrive([thing], [number])
        scope.slots.update(reference.slots)
        quietly = self.random.random() < _QUIET
        scope.steps.append(Op("fetch", (reference.number,), (number,), index, quietly))

    def _refer(self, scope: Scope) -> None:
        value = self.pick(scope.tensors)
        value.group.changeable = False
        reference = Reference(self.number(), scope.worker, (value,), {})
        scope.references.append(reference)
        scope.steps.append(Op("refer", (value.number,), (reference.number,)))

    # Backward passes.

    def _root(self, scope: Scope) -> tuple[int, ...]:
        options = [value for value in scope.tensors if value.differentiable]
        if not options:
            draw_ops.fresh_leaf(self, scope)
            options = scope.tensors[-1:]
        if self.tidy:
            return tuple(value.number for value in self._gather(scope) or options[-1:])
        scalars = [value for value in options if value.ndim == 0]
        if scalars and self.random.random() < 0.2:
            return (self._deep(scalars).number,)
        count = self.random.choice((1, 1, 2, 3, 4))
        return tuple(self._deep(options).number for _ in range(count))

    def _roots(self, scope: Scope) -> tuple[tuple[int, ...], ...]:
        count = self.random.choice((1, 1, 1, 1, 2, 3))
        return tuple(self._root(scope) for _ in range(count))

    def _once(self, scope: Scope) -> tuple[Pass, ...]:
        roots = self._roots(scope)
        if len(roots) == 1 and self.random.random() < 0.2:
            return (Pass(len(scope.steps), roots, at=self.random.randrange(self.workers)),)
        return (Pass(len(scope.steps), roots, fast=self.random.random() < 0.5),)

    def _twice(self, scope: Scope) -> tuple[Pass, ...]:
        """Draw passes over the same graph, with the same or other roots, at once or later."""
        first = self._roots(scope)
        after = len(scope.steps)
        if self.random.random() < 0.5:
            self.budget = self.random.choice((4, 12))
            self._steps(scope, self.budget)
        second = first if self.random.random() < 0.3 else self._roots(scope)
        return (
            Pass(after, first, retain_graph=True),
            Pass(len(scope.steps), second, retain_graph=self.random.random() < 0.2),
        )

    def _at_once(self, scope: Scope) -> tuple[Pass, ...]:
        """Draw two passes over the same graph, each in a thread."""
        passes = [Pass(0, self._roots(scope), retain_graph=True, at_once=n > 0) for n in range(2)]
        return tuple(one._replace(after=len(scope.steps)) for one in passes)

    def _penalty(self, scope: Scope) -> tuple[Pass, ...]:
        roots = self._roots(scope)
        more = (self._root(scope),) if self.random.random() < 0.5 else ()
        after = len(scope.steps)
        return (
            Pass(after, roots, retain_graph=True, create_graph=True),
            Pass(after, more, penalty=True),
        )


_PLANS = (
    *(_Generator._once,) * 12,
    *(_Generator._twice,) * 5,
    _Generator._at_once,
    *(_Generator._penalty,) * 2,
)
