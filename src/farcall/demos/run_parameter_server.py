"""Runs the parameter server demo as `farcall demo parameter-server` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from farcall.demos import parameter_server, parameter_server_chaos
from farcall.demos.display import open_display
from farcall.demos.elastic import ElasticRun, Unrest
from farcall.demos.launch import Run, Training
from farcall.demos.parameter_server_chaos import SERVER, TRAINER, ElasticJob
from farcall.demos.parameter_server_report import (
    ParameterServerSummary,
    chaos_view,
    draw_accuracy,
    view,
)
from farcall.demos.report import FAILED, INTERRUPTED, print_end, write_report
from farcall.torch_internals import path_of

EXIT_CODES = {"solved": 0, "failed": FAILED, "unsolved": 3, "interrupted": INTERRUPTED}
UPDATES_BETWEEN_DEATHS = 100

if find_spec("sklearn") is None:  # the server imports it, in its own process
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")


def run(options: parameter_server.ParameterServerOptions, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    with open_display(view(options, log_interval)) as display:
        training = Run(display.show, show_started=display.show_started)
        training.launch(parameter_server.run_worker, options, world_size=options.trainers + 1)
    return report(training, options, out)


def run_chaos(
    options: parameter_server.ParameterServerOptions,
    every: float,
    deaths: int,
    log_interval: int,
    out: Path,
) -> int:
    """Do the same while trainers are killed, and the server once, with the middle one of them."""

    def victims(death: int) -> Sequence[str]:
        return [TRAINER, SERVER] if death == (deaths + 1) // 2 else [TRAINER]

    unrest = Unrest(every, deaths, options.seed, work=UPDATES_BETWEEN_DEATHS)
    with open_display(chaos_view(log_interval)) as display:
        training = ElasticRun(display, unrest)
        digits = parameter_server.load_digits(options.seed)
        training.launch(
            lambda chaos: ElasticJob(options, *digits, chaos).train(),
            me="job",
            roles={SERVER: SERVER}
            | {f"{TRAINER}{rank}": TRAINER for rank in range(1, options.trainers + 1)},
            victims=victims,
            work_of=lambda progress: progress.updates,
            # Optimizers and backward passes import the second one, which takes seconds.
            modules=[parameter_server_chaos.__name__, path_of("dynamo")],
        )
    return report(training, options, out, training.deaths, counts=training.has_endured)


def report(
    training: Training[parameter_server.ParameterServerProgress],
    options: parameter_server.ParameterServerOptions,
    out: Path,
    deaths: Mapping[str, int] = MappingProxyType({}),
    *,
    counts: bool = True,
) -> int:
    """Prints and writes what came of a run; returns the exit code.

    Args:
        counts: whether the accuracy counts. It does not if too few have died meanwhile.
    """
    history = training.history
    solved = counts and bool(history) and history[-1].accuracy > parameter_server.GOAL
    summary = ParameterServerSummary(
        training.outcome("solved" if solved else "unsolved"), options, history, deaths
    )
    write_report(out, summary, {"accuracy": draw_accuracy(history, summary.line())})
    print_end(summary, training.failure)
    return EXIT_CODES[summary.outcome]
