"""`farcall demo`: programs that show farcall at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from farcall.cli.lazy import load
from farcall.cli.options import Option, RealRange


@click.group(invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Run a demo. Without a name, list them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def seed_option(default: int, says: str = "Equal seeds and options give equal runs.") -> Option:
    """`--seed`."""
    return click.option(
        "--seed",
        type=click.IntRange(min=0, max=2**32 - 1),
        default=default,
        show_default=True,
        help=says,
    )


def log_interval_option(unit: str, default: int) -> Option:
    """`--log-interval`, counted in `unit`: "Episodes"."""
    return click.option(
        "--log-interval",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help=f"{unit} between log lines, when standard output is not a terminal.",
    )


def out_option(default: str, files: str) -> Option:
    """`--out`, the folder for `files`. The command makes it with `make_folder`."""
    return click.option(
        "--out",
        type=click.Path(file_okay=False, writable=True, path_type=Path),
        default=Path(default),
        show_default=True,
        help=f"Folder for {files}.",
    )


def make_folder(path: Path) -> None:
    """Makes the folder of `--out`; where that is not possible, says so as a wrong option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"can't create the folder {path}: {error.strerror}"
        raise click.BadParameter(reason, param_hint="'--out'") from None


def unrest_options(switch: str, says: str, deaths: int) -> Option:
    """Return a switch that has workers killed, `--every` and `--deaths`."""
    options = (
        click.option(switch, is_flag=True, help=says),
        click.option(
            "--every",
            type=RealRange(0.0, 3600.0, min_open=True),
            default=10.0,
            show_default=True,
            help=f"With {switch}: seconds from one death to the next. On a busy machine it waits "
            "until all are back, and some work is done.",
        ),
        click.option(
            "--deaths",
            type=click.IntRange(min=1),
            default=deaths,
            show_default=True,
            help=f"With {switch}: how many there have to be before the run may end as solved.",
        ),
    )

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def refuse_unrest_without(switch: str, ctx: click.Context) -> None:
    """Says that `--every` and `--deaths` mean nothing, where they were given."""
    for name in ("every", "deaths"):
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.BadParameter(f"it is for {switch}", param_hint=f"'--{name}'")


@demo.command(short_help="Balance a pole: one agent learns, observers play.")
@click.option(
    "--observers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes that play, each with an environment of its own.",
)
@seed_option(default=2)
@click.option(
    "--gamma",
    type=RealRange(0.0, 1.0),
    default=0.99,
    show_default=True,
    help="Discount: what a reward is worth one step earlier.",
)
@log_interval_option("Episodes", default=10)
@click.option(
    "--max-episodes",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Give up after this many, with exit code 3.",
)
@click.option(
    "--goal",
    type=RealRange(0.0, 500.0, max_open=True),
    help="Running reward at which the run ends as solved.  [default: 475, the environment's]",
)
@unrest_options("--elastic", "Kill observers while they play; each comes back.", deaths=2)
@out_option("demo-out/cartpole", "summary.json and reward.png")
@click.pass_context
def cartpole(
    ctx: click.Context,
    *,
    observers: int,
    seed: int,
    gamma: float,
    log_interval: int,
    max_episodes: int,
    goal: float | None,
    elastic: bool,
    every: float,
    deaths: int,
    out: Path,
) -> None:
    """Balance a pole: one agent learns, observers in other processes play.

    With --elastic, observers are killed (SIGKILL) while they play, and started again.

    Exit codes: 0 solved, 1 a worker failed, 3 not solved in --max-episodes, 130 Ctrl-C.
    """
    if not elastic:
        refuse_unrest_without("--elastic", ctx)
    runner = load("farcall.demos.run_cartpole", extra="demos", needs=("gymnasium", "matplotlib"))
    goal = runner.cartpole.threshold() if goal is None else goal
    options = runner.cartpole.CartpoleOptions(observers, seed, gamma, max_episodes, goal)
    make_folder(out)
    if elastic:
        ctx.exit(runner.run_elastic(options, every, deaths, log_interval, out))
    ctx.exit(runner.run(options, log_interval, out))


def size_option(
    name: str, default: int, says: str, least: int = 1, most: int | None = None
) -> Option:
    """Return an option that is a whole number within bounds."""
    return click.option(
        name, type=click.IntRange(least, most), default=default, show_default=True, help=says
    )


@demo.command(short_help="Learn to predict words: a model on two workers.")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text in UTF-8 to learn from.  [default: the Python language reference]",
)
@size_option("--epochs", 8, "How often the text is read.")
@size_option("--embedding", 128, "Numbers that stand for a word.", most=2**16)
@size_option("--hidden", 256, "Width of the LSTM.", most=2**16)
@size_option("--layers", 1, "Layers of the LSTM.", most=64)
@click.option(
    "--dropout",
    type=RealRange(0.0, 1.0, max_open=True),
    default=0.5,
    show_default=True,
    help="Share of the embeddings and of the LSTM's output that is left out while learning.",
)
@size_option("--batch-size", 20, "Places of the text that are read side by side.")
@size_option("--bptt", 35, "Words after which gradients reach back no further.")
@click.option(
    "--learning-rate",
    type=RealRange(0.0, 1.0, min_open=True),
    default=0.005,
    show_default=True,
    help="Of the optimizer, Adam, in the first epoch.",
)
@click.option(
    "--decay",
    type=RealRange(0.0, 1.0, min_open=True),
    default=0.8,
    show_default=True,
    help="Factor of the learning rate after every epoch.",
)
@size_option("--vocabulary", 10_000, "Words to know at most; the others are <unk>.", least=2)
@seed_option(default=0)
@click.option(
    "--resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CHECKPOINT",
    help="Go on from this file, a checkpoint.pt of a run with the same options (more --epochs "
    "are fine).",
)
@log_interval_option("Batches", default=50)
@out_option("demo-out/rnn", "summary.json, loss.png and checkpoint.pt")
@click.pass_context
def rnn(
    ctx: click.Context,
    /,
    *,
    data: Path | None,
    resume: Path | None,
    log_interval: int,
    out: Path,
    **options: Any,
) -> None:
    """Learn to predict words: embeddings and decoder on one worker, the LSTM on another.

    Exit codes: 0 all epochs are done, 1 a worker failed, 130 Ctrl-C. After Ctrl-C, --resume goes
    on from the checkpoint as if nothing had happened.
    """
    runner = load("farcall.demos.run_rnn", extra="demos", needs=("matplotlib",))
    try:
        job = runner.prepare(runner.rnn.RnnOptions(**options), data, resume, out)
    except (runner.CorpusError, runner.checkpoints.CheckpointError) as error:
        raise click.UsageError(str(error)) from None
    make_folder(out)
    ctx.exit(runner.run(job, log_interval, out))


@demo.command(short_help="Tell digits apart: trainers around one parameter server.")
@click.option(
    "--mode",
    type=click.Choice(["async", "sync"]),
    default="async",
    show_default=True,
    help="Whether an update is made of one trainer's batch, or of one batch of each trainer.",
)
@click.option(
    "--trainers",
    type=click.IntRange(min=1, max=64),
    default=3,
    show_default=True,
    help="Processes that learn, each from its own part of the training pictures.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    help="How often every trainer goes through its pictures; with --chaos, at most.  "
    "[default: 20; with --chaos: 1000]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Pictures that a trainer learns from at once.",
)
@click.option(
    "--learning-rate",
    type=RealRange(0.0, 1.0, min_open=True),
    default=0.003,
    show_default=True,
    help="Of the optimizer, Adam.",
)
@click.option(
    "--hogwild",
    is_flag=True,
    help="Let trainers change the parameters at the same time, without a lock (mode async).",
)
@seed_option(default=0, says="Synchronous runs with equal seeds and options end equal.")
@log_interval_option("Measurements (every 0.1 s)", default=5)
@unrest_options("--chaos", "Kill trainers, and the server once; each comes back.", deaths=3)
@out_option("demo-out/parameter-server", "summary.json and accuracy.png")
@click.pass_context
def parameter_server(
    ctx: click.Context,
    *,
    mode: str,
    trainers: int,
    epochs: int | None,
    batch_size: int,
    learning_rate: float,
    hogwild: bool,
    seed: int,
    log_interval: int,
    chaos: bool,
    every: float,
    deaths: int,
    out: Path,
) -> None:
    """Tell handwritten digits apart: several trainers around one parameter server.

    With --chaos, a trainer is killed (SIGKILL) every few seconds, and the server once. Trainers are
    started again, and the server goes on from its last snapshot.

    Exit codes: 0 test accuracy above 95 % at the end, 1 a worker failed, 3 not above 95 %,
    130 Ctrl-C.
    """
    if hogwild and mode == "sync":
        reason = "it is for mode async; in mode sync no trainer could change a parameter meanwhile"
        raise click.BadParameter(reason, param_hint="'--hogwild'")
    if chaos and mode == "sync":
        reason = "it is for mode async; in mode sync all would wait for the one that died"
        raise click.BadParameter(reason, param_hint="'--chaos'")
    if not chaos:
        refuse_unrest_without("--chaos", ctx)
    needs = ("sklearn", "matplotlib")
    runner = load("farcall.demos.run_parameter_server", extra="demos", needs=needs)
    options = runner.parameter_server.ParameterServerOptions(
        mode,
        trainers,
        epochs or (1000 if chaos else 20),
        batch_size,
        learning_rate,
        hogwild,
        seed,
    )
    make_folder(out)
    if chaos:
        ctx.exit(runner.run_chaos(options, every, deaths, log_interval, out))
    ctx.exit(runner.run(options, log_interval, out))
