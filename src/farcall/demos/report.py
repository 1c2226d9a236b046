"""What a demo leaves behind: one summary line, `summary.json` and `reward.png`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from farcall.demos.progress import Progress


@dataclass(frozen=True)
class Summary:
    """The outcome of a run, as `summary.json` holds it.

    `outcome` is "solved", "unsolved" (the episodes ran out), "interrupted" or "failed". Rates are
    averages over `seconds`, which count from the first episode's start.
    """

    demo: str
    outcome: str
    solved: bool
    episodes: int
    running_reward: float
    seconds: float
    env_steps: int
    env_steps_per_second: float
    calls: int
    calls_per_second: float
    options: dict[str, object]
    rewards: list[float]

    def line(self) -> str:
        """The one line that ends a run."""
        return (
            f"{self.demo} {self.outcome} after {self.episodes} episodes, {self.seconds:.1f} s: "
            f"running reward {self.running_reward:.1f}, "
            f"{self.env_steps_per_second:.0f} env steps/s, "
            f"{self.calls_per_second:.0f} calls/s"
        )

    def to_json(self) -> str:
        """The fields as JSON, the run's options among them."""
        fields = asdict(self)
        return json.dumps({**fields.pop("options"), **fields}, indent=2) + "\n"


def summarise(
    demo: str, options: dict[str, object], history: list[Progress], outcome: str
) -> Summary:
    """The summary of a run that got as far as `history`, which may be empty."""
    last = history[-1] if history else Progress(0, 0.0, 0.0, 0, 0, 0.0, False)
    return Summary(
        demo=demo,
        outcome=outcome,
        solved=last.solved,
        episodes=last.episode,
        running_reward=last.running_reward,
        seconds=last.seconds,
        env_steps=last.env_steps,
        env_steps_per_second=last.env_steps_per_second,
        calls=last.calls,
        calls_per_second=last.calls_per_second,
        options=options,
        rewards=[progress.reward for progress in history],
    )


def draw_rewards(history: list[Progress], title: str, goal: float) -> Figure:
    """The reward curve: reward and running reward by episode, and the goal."""
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


def write_report(out: Path, summary: Summary, history: list[Progress], goal: float) -> None:
    """Writes `summary.json` and `reward.png` into the existing folder `out`."""
    (out / "summary.json").write_text(summary.to_json(), encoding="utf-8")
    draw_rewards(history, summary.line(), goal).savefig(out / "reward.png", dpi=120)
