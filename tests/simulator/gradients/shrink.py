"""Making a program that fails smaller, so that people can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulator.gradients.program import (
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
    Step,
    outputs_of,
)

Place = tuple[int, int]  # block, step


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = 3000) -> Program:
    """Return the smallest program found that still fails.

    Args:
        program: that fails.
        fails: whether a program does. It must say no to a program that makes no sense, which many
            of those tried here don't: what a step needs may be gone.
        attempts: how many programs to try at most.
    """
    left = attempts
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            if left <= 0:
                return program
            left -= 1
            if candidate != program and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _candidates(program: Program) -> Iterator[Program]:
    program = program._replace(seed=-1)
    if len(program.passes) > 1:
        for index in range(len(program.passes)):
            yield program._replace(passes=program.passes[:index] + program.passes[index + 1 :])
    places = [(b, s) for b, block in enumerate(program.blocks) for s in range(len(block.steps))]
    places.sort(key=lambda place: not isinstance(_step(program, place), Call))
    size = len(places) // 2
    while size > 1:
        for start in range(0, len(places), size):
            yield without(program, places[start : start + size])
        size //= 2
    for place in places:
        yield without(program, [place])
    for place in places:
        yield from _bypassed(program, place)
    for place in places:
        yield from _inlined(program, place)
    yield from _fewer_roots(program)
    yield from _fewer_values(program)
    yield from _simpler(program)
    yield from _fewer_workers(program)
    yield from _fewer_leaves(program)


def _step(program: Program, place: Place) -> Step:
    return program.blocks[place[0]].steps[place[1]]


# Leaving out steps, and whatever depends on them.


class _Gone(NamedTuple):
    values: set[int]
    slots: set[int]


def without(program: Program, places: list[Place]) -> Program:
    """Return the program without these steps and what needs them."""
    gone = _Gone(set(), set())
    for place in places:
        _drop(_step(program, place), gone)
    return _without(program, set(places), gone)


def _drop(step: Step, gone: _Gone) -> None:
    gone.values.update(outputs_of(step))
    if isinstance(step, Op) and step.name == "stash":
        gone.slots.add(step.number)


def _without(program: Program, dropped: set[Place], gone: _Gone) -> Program:
    before = -1
    while before != len(dropped) + len(gone.values) + len(gone.slots):
        before = len(dropped) + len(gone.values) + len(gone.slots)
        for b, block in enumerate(program.blocks):
            for s, step in enumerate(block.steps):
                if (b, s) in dropped:
                    continue
                if _needs(step, gone):
                    dropped.add((b, s))
                    _drop(step, gone)
                elif isinstance(step, Call):
                    params = program.blocks[step.block].params
                    gone.values.update(
                        p for p, a in zip(params, step.args, strict=True) if a in gone.values
                    )
        _drop_results(program, gone)
    blocks = [_rebuilt(program, b, dropped, gone) for b in range(len(program.blocks))]
    passes = []
    for one in program.passes:
        roots = [tuple(n for n in root if n not in gone.values) for root in one.roots]
        after = sum((0, s) not in dropped for s in range(one.after))
        kept = tuple(root for root in roots if root)
        if kept or one.penalty:
            passes.append(one._replace(roots=kept, after=after))
    return _pruned(program._replace(blocks=tuple(blocks), passes=tuple(passes)))


def _needs(step: Step, gone: _Gone) -> bool:
    if isinstance(step, Await):
        return step.pending in gone.values
    if isinstance(step, Op):
        lost = step.name == "stashed" and step.number in gone.slots
        return lost or any(number in gone.values for number in step.inputs)
    return False


def _drop_results(program: Program, gone: _Gone) -> None:
    """Drop a result at the caller, too, when it is gone in the block."""
    for block in program.blocks:
        calls = {step.output: step.block for step in block.steps if isinstance(step, Call)}
        for step in block.steps:
            if isinstance(step, Await):
                results = program.blocks[calls[step.pending]].outputs
                gone.values.update(
                    here
                    for here, there in zip(step.outputs, results, strict=True)
                    if there in gone.values
                )


def _rebuilt(program: Program, index: int, dropped: set[Place], gone: _Gone) -> Block:
    block = program.blocks[index]
    calls = {step.output: step.block for step in block.steps if isinstance(step, Call)}
    steps: list[Step] = []
    split = block.split if block.split < 0 else -1
    for s, step in enumerate(block.steps):
        if (index, s) in dropped:
            continue
        if s == block.split:
            split = len(steps)
        if isinstance(step, Call):
            steps.append(step._replace(args=_kept(step.args, gone)))
        elif isinstance(step, Await):
            results = program.blocks[calls[step.pending]].outputs
            pairs = zip(step.outputs, results, strict=True)
            outputs = tuple(here for here, there in pairs if there not in gone.values)
            steps.append(step._replace(outputs=outputs))
        else:
            steps.append(step)
    return block._replace(
        params=_kept(block.params, gone),
        steps=tuple(steps),
        outputs=_kept(block.outputs, gone),
        split=split,
    )


def _kept(numbers: tuple[int, ...], gone: _Gone) -> tuple[int, ...]:
    return tuple(number for number in numbers if number not in gone.values)


def _pruned(program: Program) -> Program:
    """Return the program without blocks that no block calls."""
    called = [0]
    for index in called:
        called += [s.block for s in program.blocks[index].steps if isinstance(s, Call)]
    called.sort()
    new = {old: position for position, old in enumerate(called)}
    blocks = []
    for index in called:
        block = program.blocks[index]
        steps = tuple(
            step._replace(block=new[step.block]) if isinstance(step, Call) else step
            for step in block.steps
        )
        blocks.append(block._replace(steps=steps))
    return program._replace(blocks=tuple(blocks))


# Leaving out values.


def _fewer_roots(program: Program) -> Iterator[Program]:
    for index, one in enumerate(program.passes):
        for r, root in enumerate(one.roots):
            for n in range(len(root)):
                smaller = (root[:n] + root[n + 1 :],) if len(root) > 1 else ()
                roots = one.roots[:r] + smaller + one.roots[r + 1 :]
                if roots or one.penalty:
                    yield _with_pass(program, index, one._replace(roots=roots))


def _with_pass(program: Program, index: int, one: Pass) -> Program:
    passes = program.passes
    return program._replace(passes=(*passes[:index], one, *passes[index + 1 :]))


def _fewer_values(program: Program) -> Iterator[Program]:
    """Yield the program without a parameter or a result of a block."""
    for block in program.blocks:
        for number in block.params:
            yield _without(program, set(), _Gone({number}, set()))
    for index, block in enumerate(program.blocks):
        for position in range(len(block.outputs)):
            yield _without_result(program, index, position)


def _without_result(program: Program, index: int, position: int) -> Program:
    gone = _Gone(set(), set())
    blocks = []
    for b, block in enumerate(program.blocks):
        pending = {s.output for s in block.steps if isinstance(s, Call) and s.block == index}
        steps: list[Step] = []
        for step in block.steps:
            if isinstance(step, Await) and step.pending in pending:
                gone.values.add(step.outputs[position])
                outputs = step.outputs[:position] + step.outputs[position + 1 :]
                steps.append(step._replace(outputs=outputs))
            else:
                steps.append(step)
        outputs = block.outputs
        if b == index:
            outputs = outputs[:position] + outputs[position + 1 :]
        blocks.append(block._replace(steps=tuple(steps), outputs=outputs))
    return _without(program._replace(blocks=tuple(blocks)), set(), gone)


def _bypassed(program: Program, place: Place) -> Iterator[Program]:
    """Yield the program with inputs of a step in the place of its outputs or results."""
    step = _step(program, place)
    if isinstance(step, Op) and len(step.outputs) == 1:
        for number in step.inputs:
            yield without(_renamed(program, {step.outputs[0]: number}), [place])
    elif isinstance(step, Await):
        block = program.blocks[place[0]]
        call = next(s for s in block.steps if isinstance(s, Call) and s.output == step.pending)
        outputs = program.blocks[call.block].outputs
        position = block.steps.index(call)
        if call.args and outputs:
            renamed = _renamed(program, dict.fromkeys(step.outputs, call.args[0]))
            yield without(renamed, [(place[0], position)])


def _inlined(program: Program, place: Place) -> Iterator[Program]:
    """Yield the program with the steps of a called block in the place of the call."""
    index, start = place
    call = _step(program, place)
    if not isinstance(call, Call) or call.way in REMOTE_WAYS or call.quietly:
        return
    callee = program.blocks[call.block]
    names = dict(zip(callee.params, call.args, strict=True))
    end = len(program.blocks[index].steps)
    for position, step in enumerate(program.blocks[index].steps):
        if isinstance(step, Await) and step.pending == call.output:
            end = position
            results = [names.get(number, number) for number in callee.outputs]
            names.update(zip(step.outputs, results, strict=True))
    program = _renamed(program, names)
    inner, block = program.blocks[call.block].steps, program.blocks[index]

    def new(position: int) -> int:
        return position + (len(inner) - 1 if position > start else 0) - (position > end)

    steps = (*block.steps[:start], *inner, *block.steps[start + 1 : end], *block.steps[end + 1 :])
    split = new(block.split) if block.split != end else -1
    program = _with_block(program, index, block._replace(steps=steps, split=split))
    if index == 0:
        passes = tuple(one._replace(after=new(one.after)) for one in program.passes)
        program = program._replace(passes=passes)
    yield _pruned(program)


def _renamed(program: Program, names: dict[int, int]) -> Program:
    """Return the program with other values in the place of these, where they are used."""

    def new(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names.get(number, number) for number in numbers)

    blocks = []
    for block in program.blocks:
        steps: list[Step] = []
        for step in block.steps:
            if isinstance(step, Call):
                steps.append(step._replace(args=new(step.args)))
            elif isinstance(step, Op):
                steps.append(step._replace(inputs=new(step.inputs)))
            else:
                steps.append(step)
        blocks.append(block._replace(steps=tuple(steps), outputs=new(block.outputs)))
    passes = tuple(one._replace(roots=tuple(map(new, one.roots))) for one in program.passes)
    return program._replace(blocks=tuple(blocks), passes=passes)


# Plainer forms of the same.


def _simpler(program: Program) -> Iterator[Program]:
    for b, block in enumerate(program.blocks):
        for s, step in enumerate(block.steps):
            for simpler in _simpler_steps(step):
                steps = (*block.steps[:s], simpler, *block.steps[s + 1 :])
                yield _with_block(program, b, block._replace(steps=steps))
        if block.split != -1:
            yield _with_block(program, b, block._replace(split=-1))
        if block.packing != "tuple":
            yield _with_block(program, b, block._replace(packing="tuple"))
    for index, one in enumerate(program.passes):
        for change in ({"fast": False}, {"at": -1}, {"create_graph": False}, {"quietly": False}):
            yield _with_pass(program, index, one._replace(**change))


def _simpler_steps(step: Step) -> Iterator[Step]:
    if isinstance(step, Call):
        yield step._replace(way=REMOTE if step.way in REMOTE_WAYS else SYNC)
        yield step._replace(packing="tuple")
        yield step._replace(quietly=False)
    elif isinstance(step, Op):
        yield step._replace(quietly=False)
        if step.name in ("counted", "checkpoint", "select", "transpose", "mean"):
            yield step._replace(name="tanh")
        if step.name in ("half_blind", "shift", "matmul", "multiply"):
            yield step._replace(name="add")


def _with_block(program: Program, index: int, block: Block) -> Program:
    blocks = program.blocks
    return program._replace(blocks=(*blocks[:index], block, *blocks[index + 1 :]))


def _fewer_workers(program: Program) -> Iterator[Program]:
    for old in reversed(range(program.workers)):
        for new in range(program.workers - 1):
            if old != new:
                yield _moved(program, old, new)


def _moved(program: Program, old: int, new: int) -> Program:
    """Return the program with one worker's steps on another, and the last worker in its place."""

    def place(worker: int) -> int:
        if worker == old:
            return new
        return old if worker == program.workers - 1 else worker

    return program._replace(
        workers=max(2, program.workers - 1),
        leaves=tuple(leaf._replace(worker=place(leaf.worker)) for leaf in program.leaves),
        blocks=tuple(block._replace(worker=place(block.worker)) for block in program.blocks),
        passes=tuple(
            one._replace(at=place(one.at)) if one.at >= 0 else one for one in program.passes
        ),
    )


def _fewer_leaves(program: Program) -> Iterator[Program]:
    """Yield the program with fewer hooks, and without the last leaf if no step uses it."""
    for index, leaf in enumerate(program.leaves):
        if leaf.hook:
            yield _with_leaf(program, index, leaf._replace(hook=""))
    used = {
        step.number
        for block in program.blocks
        for step in block.steps
        if isinstance(step, Op) and step.name == "parameter"
    }
    if program.leaves and len(program.leaves) - 1 not in used:
        yield program._replace(leaves=program.leaves[:-1])


def _with_leaf(program: Program, index: int, leaf: Leaf) -> Program:
    leaves = program.leaves
    return program._replace(leaves=(*leaves[:index], leaf, *leaves[index + 1 :]))
