"""Runs the CartPole demo as `farcall demo cartpole` does: processes, display and report."""

from __future__ import annotations

from pathlib import Path

from farcall.demos import cartpole
from farcall.demos.cartpole_report import draw_rewards, summarise, view
from farcall.demos.display import open_display
from farcall.demos.launch import Run
from farcall.demos.report import FAILED, INTERRUPTED, print_end, write_report

EXIT_CODES = {"solved": 0, "failed": FAILED, "unsolved": 3, "interrupted": INTERRUPTED}


def run(options: cartpole.Options, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    goal = cartpole.goal()
    with open_display(view(goal, log_interval)) as display:
        training = Run(display.show, show_started=display.show_started)
        training.launch(cartpole.run_worker, options, world_size=options.observers + 1)
    history = training.history
    solved = bool(history) and history[-1].solved and not training.failure
    outcome = "solved" if solved else training.outcome("unsolved")
    summary = summarise(options, history, outcome)
    write_report(out, summary, {"reward": draw_rewards(history, summary.line(), goal)})
    print_end(summary, training.failure)
    return EXIT_CODES[outcome]
