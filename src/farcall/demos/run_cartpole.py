"""Runs the CartPole demo as `farcall demo cartpole` does: processes, display and report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from farcall.demos import cartpole, cartpole_elastic
from farcall.demos.cartpole_report import draw_rewards, summarise, view
from farcall.demos.display import open_display
from farcall.demos.elastic import ElasticRun, Unrest
from farcall.demos.launch import Run, Training
from farcall.demos.report import FAILED, INTERRUPTED, print_end, write_report

EXIT_CODES = {"solved": 0, "failed": FAILED, "unsolved": 3, "interrupted": INTERRUPTED}
EPISODES_BETWEEN_DEATHS = 3


def run(options: cartpole.CartpoleOptions, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    with open_display(view(options.goal, log_interval)) as display:
        training = Run(display.show, show_started=display.show_started)
        training.launch(cartpole.run_worker, options, world_size=options.observers + 1)
    return report(training, options, out, {})


def run_elastic(
    options: cartpole.CartpoleOptions, every: float, deaths: int, log_interval: int, out: Path
) -> int:
    """Run the same with observers that are killed."""
    unrest = Unrest(every, deaths, options.seed, work=EPISODES_BETWEEN_DEATHS)
    with open_display(view(options.goal, log_interval)) as display:
        training = ElasticRun(display, unrest)
        training.launch(
            lambda chaos: cartpole_elastic.ElasticAgent(options, chaos).train(),
            me="agent",
            roles={f"observer{n}": cartpole_elastic.ROLE for n in range(1, options.observers + 1)},
            victims=lambda death: [cartpole_elastic.ROLE],
            work_of=lambda progress: progress.episode,
            modules=[cartpole.__name__],
        )
    return report(training, options, out, training.deaths)


def report(
    training: Training[cartpole.CartpoleProgress],
    options: cartpole.CartpoleOptions,
    out: Path,
    deaths: Mapping[str, int],
) -> int:
    """Prints and writes what came of a run; returns the exit code."""
    history = training.history
    solved = bool(history) and history[-1].solved and not training.failure
    outcome = "solved" if solved else training.outcome("unsolved")
    summary = summarise(options, history, outcome, deaths)
    figure = draw_rewards(history, summary.line(), options.goal)
    write_report(out, summary, {"reward": figure})
    print_end(summary, training.failure)
    return EXIT_CODES[outcome]
