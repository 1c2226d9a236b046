"""Reports of the CartPole demo: the line while it goes, the summary, the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure

from farcall.demos.cartpole import CartpoleOptions, CartpoleProgress
from farcall.demos.display import View
from farcall.demos.report import endured


@dataclass(frozen=True)
class CartpoleSummary:
    """The outcome of a run.

    `outcome` is "solved", "unsolved" (the episodes ran out), "interrupted" or "failed". Rates are
    averages over `seconds`, which count from the first episode's start. `deaths` are those of
    workers, by role.
    """

    outcome: str
    solved: bool
    episodes: int
    running_reward: float
    seconds: float
    env_steps: int
    env_steps_per_second: float
    calls: int
    calls_per_second: float
    rewards: list[float]
    options: CartpoleOptions
    deaths: Mapping[str, int]

    def line(self) -> str:
        """Return the one line that ends a run."""
        return (
            f"cartpole {self.outcome} after {self.episodes} episodes, {self.seconds:.1f} s: "
            f"running reward {self.running_reward:.1f}, "
            f"{self.env_steps_per_second:.0f} env steps/s, "
            f"{self.calls_per_second:.0f} calls/s{endured(self.deaths)}"
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of `summary.json`: the numbers, and the run's options beside them."""
        numbers = asdict(self)
        return {"demo": "cartpole", **numbers.pop("options"), **numbers}


def summarise(
    options: CartpoleOptions,
    history: list[CartpoleProgress],
    outcome: str,
    deaths: Mapping[str, int],
) -> CartpoleSummary:
    """Return the summary of a run that got as far as `history`, which may be empty."""
    last = history[-1] if history else CartpoleProgress(0, 0.0, 0.0, 0, 0, 0.0, False)
    return CartpoleSummary(
        outcome=outcome,
        solved=last.solved,
        episodes=last.episode,
        running_reward=last.running_reward,
        seconds=last.seconds,
        env_steps=last.env_steps,
        env_steps_per_second=last.env_steps_per_second,
        calls=last.calls,
        calls_per_second=last.calls_per_second,
        rewards=[progress.reward for progress in history],
        options=options,
        deaths=dict(deaths),
    )


def describe(progress: CartpoleProgress, goal: float) -> str:
    """Return one line on the state of the run, which fits a terminal of 80 columns."""
    return (
        f"episode {progress.episode:4d}  reward {progress.reward:3.0f}  "
        f"running {progress.running_reward:5.1f} of {goal:g}  "
        f"{progress.env_steps_per_second:4.0f} env steps/s  "
        f"{progress.calls_per_second:4.0f} calls/s"
    )


def view(goal: float, log_interval: int) -> View[CartpoleProgress]:
    """Return a bar that is full at the goal; a log line every `log_interval` episodes."""
    return View(
        describe=lambda progress: describe(progress, goal),
        fraction=lambda progress: progress.running_reward / goal,
        scale=lambda progress: f"running reward {progress.running_reward:.0f} of {goal:g}",
        is_logged=lambda progress: progress.episode % log_interval == 0,
    )


def draw_rewards(history: list[CartpoleProgress], title: str, goal: float) -> Figure:
    """Return the reward curve: reward and running reward by episode, and the goal."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    episodes = [progress.episode for progress in history]
    rewards = [progress.reward for progress in history]
    running = [progress.running_reward for progress in history]
    axes.plot(episodes, rewards, linewidth=0.8, alpha=0.4, label="reward")
    axes.plot(episodes, running, linewidth=2, label="running reward")
    axes.axhline(goal, linestyle="--", color="grey", linewidth=1, label=f"goal ({goal:g})")
    axes.set(xlabel="episode", ylabel="reward")
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    return figure
