"""Distributed autograd by random programs: gradients, and nodes that run, as in one process."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from simulator.gradients import (
    Bench,
    Hang,
    Program,
    describe,
    generate,
    generate_together,
    local,
    shrink,
)
from simulator.gradients.check import within
from simulator.gradients.local import run_locally
from simulator.gradients.ops import OPERATIONS, make_parameters
from simulator.gradients.outcome import Outcome, Report, differences
from simulator.gradients.program import (
    PACKINGS,
    WAYS,
    Await,
    Block,
    Call,
    Leaf,
    Op,
    Pass,
)
from simulator.gradients.scope import Group, Scope, Value
from simulator.gradients.sim import attempt, main

from farcall.autograd import context_state, graph, passes
from farcall.autograd.autograd import Autograd
from farcall.runtime.calls.deferred import result_of
from farcall.runtime.calls.server_call import ServerCall

PROGRAMS = 1000  # that are looked at
RUN = 400  # of them; `make sim` runs 1000 and more
BLOCKS = 4
TOGETHER = 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are fastest so, and programs that fail on purpose need no log."""
    threads, level = torch.get_num_threads(), logging.getLogger("farcall").level
    torch.set_num_threads(1)
    logging.getLogger("farcall").setLevel(logging.CRITICAL)
    yield
    torch.set_num_threads(threads)
    logging.getLogger("farcall").setLevel(level)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench
        assert bench.leftovers() == []


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [generate(seed) for seed in range(PROGRAMS)]


# The property.


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_have_the_gradients_of_the_local_run(bench, block):  # BWD-1, BWD-2
    size = RUN // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        assert bench.check(generate(seed)) == [], replay(seed)


def replay(seed: int, option: str = "--shrink") -> str:
    return f"python -m simulator.gradients --replay --seed {seed} {option}"


def test_programs_that_run_at_once_with_the_same_parameters_do_not_disturb_each_other(bench):
    for seed in range(TOGETHER):
        programs = generate_together(seed)
        assert bench.check_together(programs) == [], replay(seed, "--together")


def test_nothing_of_finished_programs_is_kept(bench):  # BWD-4
    for seed in range(20):
        bench.check(generate(seed))
    assert bench.leftovers() == []


def test_one_thread_per_worker_is_enough(programs):
    at_once = [p for p in programs if any(one.at_once for one in p.passes)]
    assert len(at_once) > 20
    with Bench(num_worker_threads=1) as bench:
        for program in programs[:30] + at_once:
            assert bench.check(program) == [], program.seed
        assert bench.leftovers() == []


def test_programs_run_over_sockets_too():
    with Bench("socket") as bench:
        for seed in range(30):
            assert bench.check(generate(seed)) == [], seed


# Properties of the programs.


def test_equal_seeds_give_equal_programs(programs):
    assert [generate(seed) for seed in range(50)] == programs[:50]
    assert len({describe(program) for program in programs}) == PROGRAMS


def test_programs_have_everything_that_there_is(programs):
    steps = [step for p in programs for block in p.blocks for step in block.steps]
    calls = [step for step in steps if isinstance(step, Call)]
    names = Counter(step.name for step in steps if isinstance(step, Op))
    assert names.keys() == OPERATIONS.keys() | {"refer", "fetch", "settle"}
    assert min(names.values()) > 20
    assert Counter(call.way for call in calls).keys() == set(WAYS)
    assert Counter(call.packing for call in calls).keys() == set(PACKINGS)
    assert {p.workers for p in programs} == {2, 3, 4}
    assert {p.root for p in programs} == {0, 1, 2, 3}
    waits = [block.split for p in programs for block in p.blocks]
    assert sum(split >= 0 for split in waits) > 50
    assert sum(split == -2 for split in waits) > 50
    quiet = [step for step in steps if isinstance(step, Op) and step.quietly]
    assert sum(step.name != "fetch" for step in quiet) > 50
    assert sum(step.name == "fetch" for step in quiet) > 50


def test_some_calls_are_made_under_no_grad_and_return_their_arguments(programs):
    quiet = [
        program.blocks[step.block]
        for program in programs
        for block in program.blocks
        for step in block.steps
        if isinstance(step, Call) and step.quietly
    ]
    assert len(quiet) > 200
    assert sum(not set(block.params).isdisjoint(block.outputs) for block in quiet) > 100


def test_programs_have_all_kinds_of_passes(programs):
    every = [one for program in programs for one in program.passes]
    assert sum(len(one.roots) > 1 for one in every) > 50
    assert sum(one.retain_graph for one in every) > 50
    assert sum(one.create_graph for one in every) > 20
    assert sum(one.penalty for one in every) > 20
    assert sum(one.at >= 0 for one in every) > 20
    assert sum(one.quietly for one in every) > 20


def test_programs_nest_and_come_back(programs):
    """Have enough programs in which A calls B, which calls A again, which calls B again."""
    assert sum(longest_cycle(program) >= 4 for program in programs) > 50


def longest_cycle(program: Program) -> int:
    """Return the most blocks on a path of calls back and forth between two workers."""

    def below(index: int, length: int, before: int) -> int:
        block = program.blocks[index]
        best = length
        for step in block.steps:
            if isinstance(step, Call):
                to = program.blocks[step.block].worker
                longer = length + 1 if to in (before, -1) else 2
                best = max(best, below(step.block, longer, block.worker))
        return best

    return below(0, 1, -1)


def test_most_programs_use_the_sent_tensors_and_some_could_run_fast(programs):
    outcomes = [run_locally(program) for program in programs[:300]]
    received = [any(any(r.runs.values()) for r in outcome.reports) for outcome in outcomes]
    assert sum(received) > 100
    assert sum(any(outcome.fast) for outcome in outcomes) > 10
    gradients = [g for o in outcomes for r in o.reports for g in r.gradients.values()]
    assert sum(gradient is None for gradient in gradients) > 100
    assert sum(gradient is not None for gradient in gradients) > 300
    assert sum(bool(outcome.error) for outcome in outcomes) < 30


def test_a_run_in_one_process_leaves_nothing_behind(monkeypatch):
    """Leftovers of a distributed run are then left by farcall, not by the program."""
    parameters: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def make(*args: Any) -> dict[int, torch.Tensor]:
        made = make_parameters(*args)
        parameters[seed] += map(weakref.ref, made.values())
        return made

    monkeypatch.setattr(local, "make_parameters", make)
    for seed in range(300):
        parameters[seed] = []
        if run_locally(generate(seed)).error:
            del parameters[seed]  # after an error torch's queue keeps the rest
    gc.collect()
    kept = [seed for seed, made in parameters.items() if any(one() is not None for one in made)]
    assert len(parameters) > 250
    assert kept == []


@pytest.mark.parametrize("is_parameter", [True, False])
def test_one_tensor_that_is_sent_under_two_numbers_arrives_as_one(is_parameter):
    """Keep one tensor one: a change would reach the other, which a backward pass may need."""
    sender, receiver = Scope(0, 0, {}), Scope(1, 1, {})
    if is_parameter:
        twice = [Value(n, 2, Group(), is_parameter=True, origin=-1) for n in (1, 2)]
    else:
        sender.arrive([Value(1, 2, Group())], [2])
        sender.see(sender.tensors[0], 3)
        twice = sender.tensors
    receiver.arrive([*twice, Value(9, 2, Group())], [4, 5, 6])
    first, second, other = receiver.tensors
    assert first.group is second.group
    assert other.group is not first.group
    back = Scope(0, 2, {})
    back.arrive([first, second], [7, 8])
    assert back.tensors[0].group is back.tensors[1].group


# Planted bugs.


def doubles_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = context_state.Context.accumulate

    def twice(self: Any, gradients: Any) -> None:
        accumulate(self, gradients)
        accumulate(self, gradients)

    monkeypatch.setattr(context_state.Context, "accumulate", twice)


def loses_a_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_state.Context, "accumulate", context_state.Context.replace)


def runs_sources_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run sources too early: before the others of the same nodes have their gradients."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(graph.GraphExploration, "is_shared", never, raising=False)


def prepares_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare unused parts, too."""
    prepare = passes.Pass.prepare

    def all_of_it(self: Any, source: Any, live: Any) -> Any:
        return prepare(self, source, range(len(source.edges)))

    monkeypatch.setattr(passes.Pass, "prepare", all_of_it)


def drops_the_last_tensor_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = passes.Pass.deliver

    def without_last(self: Any, source: Any, share: int, gradients: dict[int, Any]) -> None:
        if len(gradients) > 1:
            gradients[max(gradients)] = None
        deliver(self, source, share, gradients)

    monkeypatch.setattr(passes.Pass, "deliver", without_last)


def always_frees_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = property(lambda self: {"retain_graph": False, "create_graph": False})
    monkeypatch.setattr(passes.Pass, "_flags", flags)


def gives_gradients_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = property(lambda self: {"retain_graph": True, "create_graph": False})
    monkeypatch.setattr(passes.Pass, "_flags", flags)


def sends_no_links_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Autograd.send

    def send_unless_quiet(
        self: Any, context: int, peer: Any, tensors: Any, waits: bool = False
    ) -> Any:
        return send(self, context, peer, tensors if torch.is_grad_enabled() else (), waits)

    monkeypatch.setattr(Autograd, "send", send_unless_quiet)


def runs_functions_with_grad_always(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any) -> Any:
        function, args, kwargs = self._load()
        return result_of(function, function(*args, **kwargs))

    monkeypatch.setattr(ServerCall, "_call", call)


def changes_what_arrives(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    deliver = passes.Pass.deliver

    def changed(self: Any, source: Any, share: int, gradients: dict[int, Any]) -> None:
        deliver(self, source, share, change(gradients))

    monkeypatch.setattr(passes.Pass, "deliver", changed)


def swaps_tensors_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(gradients: dict[int, Any]) -> dict[int, Any]:
        shapes = {None if one is None else one.shape for one in gradients.values()}
        backwards = reversed(list(gradients.values()))
        return dict(zip(gradients, backwards, strict=True)) if len(shapes) == 1 else gradients

    changes_what_arrives(monkeypatch, swapped)


def rounds_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(gradients: dict[int, Any]) -> dict[int, Any]:
        return {
            n: one if one is None else one.float().to(one.dtype) for n, one in gradients.items()
        }

    changes_what_arrives(monkeypatch, rounded)


def cuts_the_graph_at_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the graph, which only second derivatives show: the gradients themselves are right."""

    def cut(gradients: dict[int, Any]) -> dict[int, Any]:
        return {n: one if one is None else one.detach() for n, one in gradients.items()}

    changes_what_arrives(monkeypatch, cut)


def keeps_the_first_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_state, "add", lambda one, other: one)


def averages_contributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_state, "add", lambda one, other: (one + other) / 2)


def drops_gradients_of_earlier_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = passes.Pass.start

    def after_dropping(self: Any) -> None:
        self._context.replace(
            [(leaf, torch.zeros_like(leaf)) for leaf in self._context.gradients()]
        )
        start(self)

    monkeypatch.setattr(passes.Pass, "start", after_dropping)


BUGS = {
    doubles_gradients: "gradient of",
    loses_a_contribution: "gradient of",
    runs_sources_apart: "",
    prepares_everything: "",
    drops_the_last_tensor_of_a_message: "",
    always_frees_the_graph: "error",
    gives_gradients_no_graph: "",
    sends_no_links_under_no_grad: "arrived without a link",
    runs_functions_with_grad_always: "",
    swaps_tensors_of_a_message: "gradient of",
    rounds_what_arrives: "gradient of",
    cuts_the_graph_at_each_message: "",
    keeps_the_first_contribution: "gradient of",
    averages_contributions: "gradient of",
    drops_gradients_of_earlier_passes: "gradient of",
}


# The programs that find the rare ones; these are tried first.
FOUND_BY = {
    prepares_everything: 43,
    gives_gradients_no_graph: 39,
    sends_no_links_under_no_grad: 21,
    cuts_the_graph_at_each_message: 39,
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    with Bench(rpc_timeout=5) as bench:
        for seed in (FOUND_BY.get(plant, 0), *range(300)):
            found, _ = attempt(bench, [generate(seed)])
            if found:
                assert BUGS[plant] in found.splitlines()[0]
                return
    pytest.fail("it was not found")


# Comparisons.


def outcome(**changes: Any) -> Outcome:
    gradients = {"p0": torch.tensor([1.0, 2.0], dtype=torch.float64), "p1": None}
    report = Report(gradients, {"v3": None}, Counter(v1=1), Counter(), Counter(h=2), Counter(p0=1))
    return Outcome([0.5], [report._replace(**changes)])


def test_equal_outcomes_do_not_differ():
    assert differences(outcome(), outcome()) == []
    nearly = {"p0": torch.tensor([1.0, 2.0 + 1e-13], dtype=torch.float64), "p1": None}
    assert differences(outcome(), outcome(gradients=nearly)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"gradients": {"p0": torch.tensor([1.0, 2.001], dtype=torch.float64), "p1": None}},
        {"gradients": {"p0": torch.tensor([1.0, float("nan")], dtype=torch.float64), "p1": None}},
        {"gradients": {"p0": None, "p1": None}},
        {"gradients": {"p0": torch.tensor([1.0, 2.0]).double(), "p1": torch.zeros(2).double()}},
        {"retained": {"v3": torch.ones(1)}},
        {"runs": Counter(v1=2)},
        {"zero_runs": Counter(v1=1)},
        {"hooks": Counter(h=3)},
        {"parameter_hooks": Counter()},
    ],
)
def test_every_difference_is_seen(changes):
    assert len(differences(outcome(), outcome(**changes))) == 1
    assert len(differences(outcome(**changes), outcome())) == 1


def test_zeros_are_nothing_where_gradients_are_undefined():
    zeros = {"p0": torch.tensor([1.0, 2.0]).double(), "p1": torch.zeros(2).double()}
    other = outcome(gradients=zeros, zero_runs=Counter(v1=1))
    assert len(differences(outcome(), other)) == 2
    assert differences(outcome(), other, undefined=True) == []


def test_an_error_on_one_side_is_a_difference():
    failed = Outcome([0.5], [], error="pass 0: RuntimeError", traceback="...")
    assert "RuntimeError" in differences(outcome(), failed)[0]
    assert "expected 'pass 0: RuntimeError'" in differences(failed, outcome())[0]
    assert differences(failed, failed) == []


def test_a_hanging_program_is_reported_with_stacks():
    never = threading.Event()
    with pytest.raises(Hang, match="test_a_hanging_program"):
        within(0.05, never.wait)
    never.set()


# Programs by hand.

SQUARE = Program(
    seed=-1,
    workers=2,
    leaves=(Leaf(0, 1), Leaf(1, 1, "halve")),
    blocks=(
        Block(
            worker=0,
            params=(),
            steps=(
                Op("parameter", (), (1,), 0),
                Call("rpc_sync", 1, (1,), "tuple", 2),
                Await(2, (3,)),
                Op("tanh", (3,), (4,)),
                Op("mean", (4,), (5,)),
            ),
            outputs=(),
        ),
        Block(
            worker=1,
            params=(6,),
            steps=(Op("parameter", (), (7,), 1), Op("multiply", (6, 7), (8,))),
            outputs=(8,),
        ),
    ),
    passes=(Pass(5, ((5,),)),),
)


def test_a_program_by_hand_has_the_gradients_of_the_formula(bench):
    found = bench.run(SQUARE)
    own = run_locally(SQUARE).reports
    x, y = found.reports[0].gradients["p0"], found.reports[1].gradients["p1"]
    assert x is not None
    assert y is not None
    # d mean(tanh(2 a b)) / da = 2/3 b (1 - tanh(2 a b)^2), and for b, halved by the hook.
    a, b = (p.detach() for p in (parameter(0), parameter(1)))
    slope = 2 / 3 * (1 - torch.tanh(2 * a * b) ** 2)
    torch.testing.assert_close(x, slope * b)
    torch.testing.assert_close(y, 0.5 * slope * a)
    torch.testing.assert_close(own[0].gradients["p0"], x)


def parameter(index: int) -> torch.Tensor:
    return make_parameters(SQUARE.leaves, SQUARE.leaves[index].worker)[index]


def test_a_program_reads_like_python():
    assert describe(SQUARE).splitlines() == [
        "# seed -1: 2 workers, 7 steps",
        "p0 = parameter on w0 (3)",
        "p1 = parameter on w1 (3), hook halve",
        "",
        "def block1(v6):  # on w1",
        "    v7 = parameter[1]()",
        "    v8 = multiply[0](v6, v7)",
        "    return tuple of v8",
        "",
        "def main():  # on w0",
        "    v1 = parameter[0]()",
        '    v2 = rpc_sync("w1", block1, tuple of v1)',
        "    v3 = v2.wait()",
        "    v4 = tanh[0](v3)",
        "    v5 = mean[0](v4)",
        "    backward([v5])",
    ]


def test_a_failing_program_is_made_small():
    def fails(program: Program) -> bool:
        """Return whether a program fails, as if a multiplication in a called block were wrong."""
        try:
            if run_locally(program).error:
                return False
        except Exception:
            return False
        steps = [step for block in program.blocks[1:] for step in block.steps]
        return any(isinstance(step, Op) and step.name == "multiply" for step in steps)

    seed = next(s for s in range(100) if generate(s).size > 40 and fails(generate(s)))
    small = shrink(generate(seed), fails)
    assert fails(small)
    assert small.size <= 6
    assert len(small.blocks) == 2


# The command line.


def test_command_line_sums_up_and_succeeds():
    result = CliRunner().invoke(main, ["--programs", "12"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("18 programs, ")  # 12, and twice three at once
    assert " 0 with differences" in result.output


def test_command_line_fails_and_says_how_to_replay(monkeypatch):
    doubles_gradients(monkeypatch)
    result = CliRunner().invoke(main, ["--programs", "5"])
    assert result.exit_code == 1
    assert "-m simulator.gradients --replay --seed" in result.output


def test_command_line_replays_and_shrinks_a_program(monkeypatch):
    doubles_gradients(monkeypatch)
    result = CliRunner().invoke(main, ["--replay", "--seed", "1", "--shrink"])
    assert result.exit_code == 1
    assert "def main():  # on w" in result.output
    assert "gradient of" in result.output
    assert len(result.output.splitlines()) < 25


def test_command_line_replays_programs_that_run_at_once():
    result = CliRunner().invoke(main, ["--replay", "--seed", "4", "--together"])
    assert result.exit_code == 0, result.output
    assert result.output.count("def main():") == 3
    assert result.output.endswith("no difference\n")
