"""farcall against torch.distributed.rpc, and others if asked, on this machine, in turn, in one run.

    python benchmarks/run.py [--rounds N] [--cases noop,rnn_tiny,...] [--blocks N]
                             [--implementations farcall,torch,...] [--against CHECKOUT]
                             [--out FOLDER]

Each round starts fresh processes for each implementation, which then run in turn, in short blocks
(`turns.py`). Prints the table of all cases (`table.py`), and writes it into the folder, with all
single times and pictures. Exits with 0 whether what farcall has to reach is reached or not: times
of one run on a busy machine prove little. Exits with 1 if farcall and torch computed different
things in training: then their times can't be compared.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import click
from checkout import Checkout, state_of
from plans import (
    BEFORE,
    BOTH,
    CASES,
    DISTRIBUTIONS,
    EVERY,
    FARCALL,
    SETS,
    Group,
    groups,
)
from plots import draw_ratios, draw_times
from rich.console import Console
from rich.progress import Progress
from table import markdown, result_of
from turns import Blocks, Measured, PeerFailed, measure

DPI = 120
THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_")


def measure_rounds(
    round_: list[Group], rounds: int, advance: Callable[[], None], sources: dict[str, Path]
) -> Measured:
    """Measure some rounds, one after the other."""
    all_ = Measured({}, [])
    for turn, group in product(range(rounds), round_):
        measured = measure(group.begun_by_another(turn), advance, sources)
        all_.disagreements.extend(measured.disagreements)
        for case, by_implementation in measured.blocks.items():
            for name, blocks in by_implementation.items():
                all_.blocks.setdefault(case, {}).setdefault(name, []).extend(blocks)
    return all_


def machine(implementations: list[str]) -> dict[str, object]:
    """Return the facts that the times depend on."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        # With any of these set, "default threads" means what they say.
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(THREAD_VARIABLES)
        },
        "versions": {
            name: version(DISTRIBUTIONS[name]) for name in implementations if name != BEFORE
        },
    }


def words_for_machine() -> str:
    """Return the cores, the processor and the system, but nothing that names this host."""
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text("utf-8") if info.exists() else "").splitlines()
        if line.startswith("model name")
    ]
    processor = " ".join(models[0].split()) if models else platform.machine()
    return f"{os.cpu_count()} cores of {processor}, {platform.system()} {platform.machine()}"


def facts_of_run(
    began: Checkout, rounds: int, cases: list[str], implementations: list[str], all_blocks: bool
) -> dict[str, object]:
    """Return the facts by which `keep.py` decides whether a run is worth keeping.

    Args:
        began: the state of the checkout before the first measurement.
        all_blocks: whether each case had the number of blocks that it has in its plan.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": began.commit,
        "clean": began.is_clean and state_of() == began,
        "machine": words_for_machine(),
        "rounds": rounds,
        "complete": all_blocks and set(cases) == set(CASES) and set(BOTH) <= set(implementations),
    }


def names(
    known: list[str], sets: dict[str, list[str]] | None = None, needed: str | None = None
) -> Callable[..., list[str]]:
    """Return the check of an option that lists names with commas, or names of `sets` of them."""
    sets = sets or {}

    def check(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
        listed = [name for word in value.split(",") for name in sets.get(word, [word])]
        chosen = list(dict.fromkeys(listed))
        for name in chosen:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join([*known, *sets])}")
        if needed is not None and needed not in chosen:
            raise click.BadParameter(f"{needed!r} must be among them, for comparison")
        return chosen

    return check


def source_of(
    _context: click.Context, _parameter: click.Parameter, value: Path | None
) -> Path | None:
    """Return the folder from which the farcall of another checkout is imported."""
    if value is None:
        return None
    source = value.resolve() / "src"
    if not list(source.glob("farcall/_native.*")):
        raise click.BadParameter(f"{value} is no checkout that is built: run `make native` there")
    return source


def check_installed(implementations: list[str]) -> None:
    for name in implementations:
        if find_spec(name) is None:
            reason = f"{name} is not installed; `make bench-all` installs it"
            raise click.BadParameter(reason, param_hint="'--implementations'")


def report(
    times: dict[str, dict[str, Blocks]],
    implementations: list[str],
    run: dict[str, object],
    out: Path,
) -> None:
    results = {case: result_of(case, blocks) for case, blocks in times.items()}
    table = markdown(results)
    print(table)
    everything = {
        "run": run,
        "machine": machine(implementations),
        "results": {case: asdict(result) for case, result in results.items()},
        "seconds": times,
    }
    (out / "bench.json").write_text(json.dumps(everything, allow_nan=False) + "\n", "utf-8")
    (out / "table.md").write_text(table + "\n", "utf-8")
    draw_ratios(results).savefig(out / "ratios.png", dpi=DPI)
    draw_times(times).savefig(out / "times.png", dpi=DPI)


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Fresh processes for each.",
)
@click.option(
    "--cases",
    default=",".join(CASES),
    callback=names(list(CASES), SETS),
    help="Which, with commas; `training` stands for all training.  [default: all]",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    help="Blocks of each implementation in a round, instead of what the case has.",
)
@click.option(
    "--implementations",
    default=",".join(BOTH),
    show_default=True,
    callback=names(list(EVERY), needed=FARCALL),
    help=f"Which, with commas: {', '.join(EVERY)}.",
)
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    callback=source_of,
    help="Compare with the farcall of another checkout, too; it is called `before`.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default=Path("bench-out"),
    show_default=True,
    help="Folder for bench.json, table.md, ratios.png and times.png.",
)
def main(
    rounds: int,
    cases: list[str],
    blocks: int | None,
    implementations: list[str],
    against: Path | None,
    out: Path,
) -> None:
    """Compare farcall with torch.distributed.rpc, and with others."""
    check_installed(implementations)
    sources: dict[str, Path] = {}
    if against is not None:
        sources[BEFORE] = against
        implementations = [*implementations, BEFORE]
    out.mkdir(parents=True, exist_ok=True)
    began = state_of()
    round_ = groups(cases, implementations, blocks)
    total = rounds * sum(
        plan.blocks * len(group.implementations[case])
        for group in round_
        for case, plan in group.plans.items()
    )
    # Drawn between blocks only: a thread that draws would disturb the measurement.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("Measuring", total=total)
        try:
            measured = measure_rounds(
                round_, rounds, lambda: progress.update(bar, advance=1, refresh=True), sources
            )
        except PeerFailed as error:
            raise click.ClickException(str(error)) from None
    run = facts_of_run(began, rounds, cases, implementations, blocks is None)
    report({case: measured.blocks[case] for case in cases}, implementations, run, out)
    if measured.disagreements:
        raise click.ClickException("\n".join(measured.disagreements))


if __name__ == "__main__":
    main()
