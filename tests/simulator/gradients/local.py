"""The program run in one process and one thread, with torch's own backward.

A call is a call of a function; its arguments are cloned, so that a later change in place is not
seen by the callee, and a tensor that requires grad stays in the graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from simulator.gradients.execute import Bundle, Frame, Main, grad_mode, penalty, unpack
from simulator.gradients.ops import Site, Tally, make_parameters
from simulator.gradients.outcome import Outcome, accumulate, report_of, warnings_off
from simulator.gradients.program import REMOTE_WAYS, Call, Program


class LocalReference:
    """A reference: where the value lives, and the value."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: int, value: Any) -> None:
        self.owner = owner
        self.value = value


class LocalWorld:
    """All workers at once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sent = 0
        self._used: set[int] = set()
        self.tallies = [Tally() for _ in range(program.workers)]
        self.sites = [
            Site(worker, make_parameters(program.leaves, worker, self.tallies[worker]))
            for worker in range(program.workers)
        ]

    def call(self, site: Site, call: Call, args: Any) -> Any:
        """Run the block at once."""
        block = self._program.blocks[call.block]
        callee = self.sites[block.worker]
        arrived = self._send(args)
        frame = Frame(self, self._program, callee, block, unpack(arrived))
        frame.run(0, len(block.steps))
        results = frame.results()
        if call.way in REMOTE_WAYS:
            return LocalReference(block.worker, results)
        return self._send(results)

    def wait(self, site: Site, pending: Any) -> Any:
        """Return at once: the results are there."""
        return pending

    def refer(self, site: Site, value: Any) -> Any:
        """Return a reference to a value of this worker."""
        return LocalReference(site.index, value)

    def fetch(self, site: Site, reference: LocalReference) -> Any:
        """Return the value itself on its owner, elsewhere a copy."""
        if reference.owner == site.index:
            return reference.value
        return self._send(reference.value)

    def settle(self, site: Site, reference: Any) -> None:
        """Return at once: the value is there."""

    def begin_pass(self) -> None:
        """Note from now on which of the sent tensors a backward pass uses."""
        self._used.clear()

    @property
    def unused(self) -> int:
        """Return how many of the sent tensors that require grad the backward pass has not used."""
        return self._sent - len(self._used)

    def _send(self, container: Any) -> Any:
        sent: dict[int, torch.Tensor] = {}
        with torch.enable_grad():
            copy = self._copy(container, sent)
        for tensor in sent.values():
            if tensor.requires_grad:
                # Not this world, which has the tensor: a cycle through a hook is never collected.
                use = partial(_use, self._used, self._sent)
                self._sent += 1
                tensor.register_hook(use)  # type: ignore[no-untyped-call]
        return copy

    def _copy(self, thing: Any, sent: dict[int, torch.Tensor]) -> Any:
        if isinstance(thing, torch.Tensor):
            if id(thing) not in sent:
                sent[id(thing)] = thing.clone() if thing.requires_grad else thing.detach().clone()
            return sent[id(thing)]
        if isinstance(thing, LocalReference):
            return thing
        if isinstance(thing, tuple | list):
            return type(thing)(self._copy(part, sent) for part in thing)
        if isinstance(thing, dict):
            return {key: self._copy(part, sent) for key, part in thing.items()}
        if isinstance(thing, Bundle):
            return Bundle([self._copy(part, sent) for part in thing.things])
        return thing


def _use(used: set[int], number: int, gradient: torch.Tensor | None) -> None:
    used.add(number)


def run_locally(program: Program) -> Outcome:
    """Run the program in one process; return its outcome."""
    world = LocalWorld(program)
    root = world.sites[program.root]
    main = Main(Frame(world, program, root, program.blocks[0], ()), program)
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in world.sites]
    outcome = Outcome()
    for index, one in enumerate(program.passes):
        roots = main.up_to(index)
        if one.penalty:
            roots.append(penalty(gradients[program.root].values()))
        outcome.roots += [root.item() for root in roots]
        world.begin_pass()
        try:
            with warnings_off(), grad_mode(one.quietly):
                torch.autograd.backward(
                    roots, retain_graph=one.retain_graph, create_graph=one.create_graph
                )
        except (RuntimeError, ArithmeticError) as error:
            outcome.error = f"pass {index}: {type(error).__name__}"
            outcome.traceback = str(error)
            break
        outcome.fast.append(one.fast and not world.unused)
        for site, taken in zip(world.sites, gradients, strict=True):
            _take_gradients(site, taken)
    else:
        main.finish()
    for site, tally, taken in zip(world.sites, world.tallies, gradients, strict=True):
        outcome.reports.append(report_of(site, taken, tally))
        site.clear()
    return outcome


def _take_gradients(site: Site, gradients: dict[str, torch.Tensor]) -> None:
    """Add what a pass left in `.grad`, out of place: a graph may need the former sum."""
    for name, leaf in site.leaves().items():
        if leaf.grad is not None:
            gradients[name] = accumulate(gradients.get(name), leaf.grad)
            leaf.grad = None
