"""Runs the CartPole demo as `farcall demo cartpole` does: processes, display and report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from farcall.demos import cartpole
from farcall.demos.display import open_display
from farcall.demos.launch import Run, WorkerFailed
from farcall.demos.report import summarise, write_report

EXIT_CODES = {"solved": 0, "failed": 1, "unsolved": 3, "interrupted": 130}


def run(options: cartpole.Options, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    goal = cartpole.goal()
    with open_display(log_interval, goal) as display:
        training = Run(display.show)
        failure = _train(training, options)
    outcome = "failed" if failure else _outcome(training)
    summary = summarise("cartpole", asdict(options), training.history, outcome)
    write_report(out, summary, training.history, goal)
    click.echo(summary.line())
    if failure:
        click.echo(f"Error: {failure}", err=True)
    return EXIT_CODES[outcome]


def _train(training: Run, options: cartpole.Options) -> WorkerFailed | None:
    try:
        training.launch(cartpole.run_worker, options, world_size=options.observers + 1)
    except WorkerFailed as failure:
        return failure
    return None


def _outcome(training: Run) -> str:
    if training.history and training.history[-1].solved:
        return "solved"
    return "interrupted" if training.interrupted else "unsolved"
