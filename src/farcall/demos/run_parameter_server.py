"""Runs the parameter server demo as `farcall demo parameter-server` does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from farcall.demos import parameter_server
from farcall.demos.display import open_display
from farcall.demos.launch import Run
from farcall.demos.parameter_server_report import Summary, draw_accuracy, view
from farcall.demos.report import FAILED, INTERRUPTED, print_end, write_report

EXIT_CODES = {"solved": 0, "failed": FAILED, "unsolved": 3, "interrupted": INTERRUPTED}

if find_spec("sklearn") is None:  # the server imports it, in its own process
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")


def run(options: parameter_server.Options, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    with open_display(view(options, log_interval)) as display:
        training = Run(display.show, show_started=display.show_started)
        training.launch(parameter_server.run_worker, options, world_size=options.trainers + 1)
    history = training.history
    solved = bool(history) and history[-1].accuracy > parameter_server.GOAL
    summary = Summary(training.outcome("solved" if solved else "unsolved"), options, history)
    write_report(out, summary, {"accuracy": draw_accuracy(history, summary.line())})
    print_end(summary, training.failure)
    return EXIT_CODES[summary.outcome]
