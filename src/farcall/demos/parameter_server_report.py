"""Reports of the parameter server demo: lines, the summary, the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure

from farcall.demos.display import View
from farcall.demos.parameter_server import GOAL, ParameterServerOptions, ParameterServerProgress
from farcall.demos.report import endured

NOTHING = ParameterServerProgress(
    number=0, seconds=0.0, accuracy=0.0, updates=0, images=0, epochs=0.0
)


@dataclass(frozen=True)
class ParameterServerSummary:
    """The outcome of a run.

    `outcome` is "solved" (the goal is met at the end of the run), "unsolved", "interrupted" or
    "failed". The last of `history` counts, which need not be its best. `deaths` are those of
    workers, by role.
    """

    outcome: str
    options: ParameterServerOptions
    history: list[ParameterServerProgress]
    deaths: Mapping[str, int]

    @property
    def last(self) -> ParameterServerProgress:
        """The last state of the run."""
        return self.history[-1] if self.history else NOTHING

    def line(self) -> str:
        """Return the one line that ends a run."""
        last = self.last
        return (
            f"parameter-server {self.outcome} after {last.epochs:.1f} epochs, "
            f"{last.seconds:.1f} s: test accuracy {100 * last.accuracy:.1f} %, "
            f"{last.updates_per_second:.0f} updates/s, {last.images_per_second:.0f} images/s"
            f"{endured(self.deaths)}"
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of `summary.json`: the numbers, and the run's options beside them.

        `curve` has an entry for every measurement: seconds since training began, updates and
        images so far, and accuracy on the test pictures (0 to 1). Rates are averages over
        `seconds`.
        """
        last = self.last
        return {
            "demo": "parameter-server",
            **asdict(self.options),
            "outcome": self.outcome,
            "solved": self.outcome == "solved",
            "goal": GOAL,
            "accuracy": last.accuracy,
            "epochs_done": last.epochs,
            "seconds": last.seconds,
            "updates": last.updates,
            "updates_per_second": last.updates_per_second,
            "images": last.images,
            "images_per_second": last.images_per_second,
            "deaths": dict(self.deaths),
            "curve": [
                {
                    "seconds": progress.seconds,
                    "updates": progress.updates,
                    "images": progress.images,
                    "accuracy": progress.accuracy,
                }
                for progress in self.history
            ],
        }


def describe(progress: ParameterServerProgress) -> str:
    """Return one line on the state of the run, which fits a terminal of 80 columns."""
    return (
        f"epoch {progress.epochs:5.1f}  test accuracy {100 * progress.accuracy:5.1f} %  "
        f"{progress.updates_per_second:4.0f} updates/s  "
        f"{progress.images_per_second:6.0f} images/s"
    )


def view(options: ParameterServerOptions, log_interval: int) -> View[ParameterServerProgress]:
    """Make a bar that is full after all epochs; a log line per `log_interval` measurements."""
    return View(
        describe=describe,
        fraction=lambda progress: progress.epochs / options.epochs,
        scale=lambda progress: f"epoch {progress.epochs:.1f} of {options.epochs}",
        is_logged=lambda progress: progress.number % log_interval == 0,
    )


def chaos_view(log_interval: int) -> View[ParameterServerProgress]:
    """Return a bar that is full at the goal, since training among deaths has no other end."""
    return View(
        describe=describe,
        fraction=lambda progress: progress.accuracy / GOAL,
        scale=lambda progress: f"accuracy {100 * progress.accuracy:.0f} of {100 * GOAL:g} %",
        is_logged=lambda progress: progress.number % log_interval == 0,
    )


def draw_accuracy(history: list[ParameterServerProgress], title: str) -> Figure:
    """Return the accuracy on the test pictures over time, and the goal."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    seconds = [progress.seconds for progress in history]
    percent = [100 * progress.accuracy for progress in history]
    goal = 100 * GOAL
    axes.plot(seconds, percent, linewidth=2, marker=".", label="test accuracy")
    axes.axhline(goal, linestyle="--", color="grey", linewidth=1, label=f"goal ({goal:g} %)")
    axes.set(xlabel="seconds since training began", ylabel="test accuracy, %", ylim=(0, 100))
    axes.set_yticks(range(0, 101, 10))
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
