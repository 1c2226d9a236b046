"""A random program as plain data, and as text to read.

A program has leaves (parameters), each on one worker, and blocks: straight-line functions, each
run once on one worker. Block 0 is the main program. A block computes values; each has a number
that is unique in the program. All tensors are float64 with 0, 1 or 2 dimensions of size 3, so that
almost any operation fits almost any value, and all elements stay between -1 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SIDE = 3  # size of every dimension
MAX_WORKERS = 4

# How a block on a worker is called.
SYNC = "rpc_sync"
ASYNC = "rpc_async"
REMOTE = "remote"
METHOD_SYNC = "rref.rpc_sync"
METHOD_ASYNC = "rref.rpc_async"
METHOD_REMOTE = "rref.remote"
WAYS = (SYNC, ASYNC, REMOTE, METHOD_SYNC, METHOD_ASYNC, METHOD_REMOTE)
REMOTE_WAYS = (REMOTE, METHOD_REMOTE)

# Containers in which arguments and results travel.
PACKINGS = ("tuple", "list", "dict", "nested", "object")


class Leaf(NamedTuple):
    """A parameter. `hook` names the change of its gradient; "" stands for none."""

    worker: int
    ndim: int
    hook: str = ""


class Op(NamedTuple):
    """A step on the worker itself.

    Attributes:
        name: of an operation in `ops`.
        inputs: numbers of the values it takes.
        outputs: numbers of the values it gives.
        number: a parameter of the operation, such as a row.
        quietly: under `torch.no_grad`.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    number: int = 0
    quietly: bool = False


class Call(NamedTuple):
    """A step that has a block run on its worker; its results come with an `Await`.

    Attributes:
        way: one of `WAYS`. A remote way gives a reference, which is a value like others.
        block: index of the block.
        args: values (tensors and references) that become the block's `params`.
        packing: the container they travel in.
        output: number of the pending call, or of the reference.
        quietly: under `torch.no_grad`. Arguments stay connected to their graph.
    """

    way: str
    block: int
    args: tuple[int, ...]
    packing: str
    output: int
    quietly: bool = False


class Await(NamedTuple):
    """A step that waits for a pending call and takes its results."""

    pending: int
    outputs: tuple[int, ...]


Step = Op | Call | Await


class Block(NamedTuple):
    """A function: `params` get the arguments, `outputs` are the results.

    Attributes:
        worker: where it runs.
        split: index of an `Await` step; it is waited for without a thread, and the steps after it
            run in a callback (`async_execution`). -2: a completed future is returned. -1: no
            future at all.
    """

    worker: int
    params: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    packing: str = "tuple"
    split: int = -1


class Pass(NamedTuple):
    """One backward pass.

    Attributes:
        after: number of steps of the main block that run before it.
        roots: for each root the values that it sums up; one value without dimensions is a root
            itself.
        retain_graph, create_graph: as for `torch.autograd.backward`.
        fast: with `mode="fast"`, if this pass uses every tensor that was sent.
        penalty: one more root, the sum of squares of the gradients that the main worker's leaves
            have so far.
        at: start it with `RRef.backward`, of the one root, on this worker. -1: with `backward`.
        at_once: run it at the same time as the pass before, which both keep the graph.
        quietly: start it under `torch.no_grad`, which changes nothing.
    """

    after: int
    roots: tuple[tuple[int, ...], ...]
    retain_graph: bool = False
    create_graph: bool = False
    fast: bool = False
    penalty: bool = False
    at: int = -1
    at_once: bool = False
    quietly: bool = False


class Program(NamedTuple):
    """A program. `blocks[0]` is the main one; `seed` replays it (-1: it was made smaller)."""

    seed: int
    workers: int
    leaves: tuple[Leaf, ...]
    blocks: tuple[Block, ...]
    passes: tuple[Pass, ...]

    @property
    def root(self) -> int:
        """The worker of the main block."""
        return self.blocks[0].worker

    @property
    def size(self) -> int:
        """Return how many steps it has."""
        return sum(len(block.steps) for block in self.blocks)

    @property
    def has_undefined_gradients(self) -> bool:
        """Return whether one of its nodes says that it has no gradient for an input."""
        return any(
            isinstance(step, Op) and step.name == "half_blind"
            for block in self.blocks
            for step in block.steps
        )


def outputs_of(step: Step) -> tuple[int, ...]:
    """Numbers of the values that a step gives."""
    return (step.output,) if isinstance(step, Call) else step.outputs


def describe(program: Program) -> str:
    """Return the program as text that reads like Python."""
    return "\n".join(_lines(program))


def _lines(program: Program) -> Iterator[str]:
    yield f"# seed {program.seed}: {program.workers} workers, {program.size} steps"
    for index, leaf in enumerate(program.leaves):
        shape = "x".join([str(SIDE)] * leaf.ndim) or "scalar"
        hook = f", hook {leaf.hook}" if leaf.hook else ""
        yield f"p{index} = parameter on w{leaf.worker} ({shape}){hook}"
    for index in range(len(program.blocks) - 1, -1, -1):
        yield ""
        yield from _block_lines(program, index)


def _block_lines(program: Program, index: int) -> Iterator[str]:
    block = program.blocks[index]
    if block.split != -1:
        yield "@async_execution"
    yield f"def {_name(index)}({_values(block.params)}):  # on w{block.worker}"
    for position, step in enumerate(block.steps):
        if index == 0:
            yield from _pass_lines(program, position)
        then = "  # the rest in a callback" if position == block.split else ""
        yield f"    {_step_line(program, step)}{then}"
    if index == 0:
        yield from _pass_lines(program, len(block.steps))
    elif block.split == -2:
        yield f"    return completed({block.packing} of {_values(block.outputs)})"
    else:
        yield f"    return {block.packing} of {_values(block.outputs) or 'nothing'}"


def _pass_lines(program: Program, position: int) -> Iterator[str]:
    for one in program.passes:
        if one.after != position:
            continue
        roots = [f"sum({_values(root)})" if len(root) > 1 else _values(root) for root in one.roots]
        if one.penalty:
            roots.append("sum(g ** 2 for g in get_gradients().values())")
        options = "".join(
            f", {name}" for name in ("retain_graph", "create_graph", "fast") if getattr(one, name)
        )
        options += f", RRef on w{one.at}" if one.at >= 0 else ""
        options += ", at once with the pass before" if one.at_once else ""
        quietly = "  # no_grad" if one.quietly else ""
        yield f"    backward([{', '.join(roots)}]{options}){quietly}"


def _step_line(program: Program, step: Step) -> str:
    if isinstance(step, Await):
        return f"{_values(step.outputs) or '_'} = v{step.pending}.wait()"
    if isinstance(step, Call):
        worker = program.blocks[step.block].worker
        args = f", {step.packing} of {_values(step.args)}" if step.args else ""
        quietly = "  # no_grad" if step.quietly else ""
        return f'v{step.output} = {step.way}("w{worker}", {_name(step.block)}{args}){quietly}'
    inputs = _values(step.inputs)
    call = f"{step.name}[{step.number}]({inputs})"
    assigned = f"{_values(step.outputs)} = " if step.outputs else ""
    return f"{assigned}{call}{'  # no_grad' if step.quietly else ''}"


def _name(block: int) -> str:
    return f"block{block}" if block else "main"


def _values(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"v{number}" for number in numbers)
