"""`farcall demo`: programs that show farcall at work."""

from __future__ import annotations

from pathlib import Path

import click

from farcall.cli.lazy import load

NEEDS = ("gymnasium", "matplotlib")


@click.group(invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Run a demo. Without a name, list them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"can't create the folder {path}: {error.strerror}"
        raise click.BadParameter(reason, param_hint="'--out'") from None


@demo.command(short_help="Balance a pole: one agent learns, observers play.")
@click.option(
    "--observers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes that play, each with an environment of its own.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=2,
    show_default=True,
    help="Equal seeds and options give equal runs.",
)
@click.option(
    "--gamma",
    type=click.FloatRange(0.0, 1.0),
    default=0.99,
    show_default=True,
    help="Discount: what a reward is worth one step earlier.",
)
@click.option(
    "--log-interval",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Episodes between log lines, when standard output is not a terminal.",
)
@click.option(
    "--max-episodes",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Give up after this many, with exit code 3.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default=Path("demo-out/cartpole"),
    show_default=True,
    help="Folder for summary.json and reward.png.",
)
@click.pass_context
def cartpole(
    ctx: click.Context,
    *,
    observers: int,
    seed: int,
    gamma: float,
    log_interval: int,
    max_episodes: int,
    out: Path,
) -> None:
    """Balance a pole: one agent learns, observers in other processes play.

    Exit codes: 0 solved, 1 a worker failed, 3 not solved in --max-episodes, 130 Ctrl-C.
    """
    runner = load("farcall.demos.run_cartpole", extra="demos", needs=NEEDS)
    options = runner.cartpole.Options(observers, seed, gamma, max_episodes)
    _make_folder(out)
    ctx.exit(runner.run(options, log_interval, out))
