"""`farcall doctor`: faults of this machine, of its workers and of the paths between them."""

from __future__ import annotations

import click
import msgspec
from rich.table import Table
from rich.text import Text

from farcall.cli.consoles import console_for_tables
from farcall.cli.options import Seconds, group_option, timeout_option
from farcall.monitor import Diagnosis, Finding, Pair
from farcall.monitor import doctor as look
from farcall.runtime.inspection.reports import rate

STYLES = {"wrong": "bold red", "look": "bold yellow", "fine": "green"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print all that was found, as JSON.")
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure each path between workers, or none. Default: unless something hangs.",
)
@click.option(
    "--seconds",
    type=Seconds(),
    default=10.0,
    show_default=True,
    help="Begin to measure no further path after so many.",
)
@group_option()
@timeout_option()
def doctor(
    as_json: bool, measure: bool | None, seconds: float, group: int | None, timeout: float
) -> None:
    """Name the faults of this machine, of its workers and of the paths between them.

    A line each, what matters most first: "wrong" does not work, "look" may be in the way, and "->"
    says what to do about it. It looks at name resolution, ports, the secret (which is never
    shown), versions, limits of files, threads and memory, and the clock. If there are workers, it
    says what they hang on, and measures latency and bandwidth of each path: which one calls take,
    and why not a better one. Workers are found as by `farcall status`.
    """
    try:
        diagnosis = look(measure=measure, group=group, timeout=timeout, seconds=seconds)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_plain(diagnosis))).decode())
        return
    console = console_for_tables()
    for finding in diagnosis.findings:
        console.print(_line(finding), soft_wrap=True)
    if diagnosis.pairs:
        console.print()
        console.print(_table(diagnosis.pairs))
    if diagnosis.unmeasured:
        console.print(Text(f"not measured: {diagnosis.unmeasured} (--measure)", "dim"))


def _plain(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "findings": [one._asdict() for one in diagnosis.findings],
        "pairs": [one._asdict() for one in diagnosis.pairs],
        "unmeasured": diagnosis.unmeasured,
    }


def _line(finding: Finding) -> Text:
    cure = f" -> {finding.cure}" if finding.cure else ""
    level = Text(f"{finding.level:<5}", STYLES[finding.level])
    return Text.assemble(level, f"  {finding.subject}: {finding.text}", (cure, "bold"))


def _table(pairs: list[Pair]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("from", "to", "path"):
        table.add_column(title)
    for title in ("a call", "bandwidth"):
        table.add_column(title, justify="right")
    for title in ("protection", "why no better path"):
        table.add_column(title)
    for caller, path in pairs:
        row = (
            caller,
            path.name,
            path.path.partition(" ")[0] or "-",
            "-" if path.latency is None else f"{path.latency * 1e6:.0f} us",
            "-" if path.bandwidth is None else rate(path.bandwidth),
            path.protection or "-",
            path.unreached or path.drawback,
        )
        table.add_row(*map(Text, row))  # a text could be markup: ":cat:"
    return table
