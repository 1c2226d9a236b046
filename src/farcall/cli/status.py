"""`farcall status`: which workers there are, and what they do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count

import click
import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farcall.cli.consoles import console_for_tables
from farcall.cli.options import group_option, timeout_option
from farcall.monitor import AskResult, ask_all
from farcall.runtime.inspection.reports import WorkerReport

NONE_FOUND = (
    "found no workers of this user on this machine (a worker whose option `paths` leaves out unix "
    "is found only through others)"
)
MOST_NAMES = 4  # of other workers; of more only the numbers are shown


@click.command()
@click.option("--watch", is_flag=True, help="Show it anew each second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known, as JSON.")
@group_option()
@timeout_option()
def status(watch: bool, as_json: bool, group: int | None, timeout: float) -> None:
    """Show the workers of this user on this machine, and those that they are in a group with.

    "out" are calls that a worker has made and that have no outcome, "in" those that it serves now,
    "queued" those of them that wait for a thread, and "served" those that it has served so far.
    "paths" says how it reaches each other worker, or how many: "shm" (shared memory), "unix" (a
    Unix socket) or "tcp".

    It needs no secret for those of this machine. Those of other machines are asked with the secret
    in FARCALL_SECRET or FARCALL_SECRET_FILE, or the certificates in FARCALL_TLS_CERT, _KEY and _CA.
    """
    console = console_for_tables()
    ask = partial(_ask, group, timeout)
    if watch and console.is_terminal and not as_json:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in _seconds():
                live.update(_shown(ask()), refresh=True)
    for number in _seconds() if watch else range(1):
        if as_json:
            click.echo(_json(ask()))
            continue
        if number:
            click.echo()
        console.print(_shown(ask()))
        console.file.flush()  # what reads the pipe need not wait for more


def _seconds() -> Iterator[int]:
    """Count from 0, once a second."""
    for number in count():
        began = time.monotonic()
        yield number
        time.sleep(max(0.0, began + 1.0 - time.monotonic()))


def _json(answer: AskResult) -> str:
    plain = {"reports": answer.reports, "silent": [one._asdict() for one in answer.silent]}
    return msgspec.json.format(msgspec.json.encode(plain)).decode()


def _ask(group: int | None, timeout: float) -> AskResult:
    try:
        answer = ask_all(timeout=timeout)
        return answer if group is None else answer.of_group(group)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _shown(answer: AskResult) -> Group | Text:
    if not (answer.reports or answer.silent):
        return Text(NONE_FOUND)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("worker", "role", "rank", "host", "pid", "state", "age"):
        table.add_column(title)
    for title in ("out", "in", "queued", "served", "memory", "files", "refs"):
        table.add_column(title, justify="right")
    table.add_column("paths")
    for report in answer.reports:
        table.add_row(*map(Text, _row(report)))  # a text could be markup: ":cat:"
    for one in answer.silent:
        why = one.state if one.state.startswith("is stopped") else one.why
        row = (one.name or "?", "", "", "", str(one.pid or ""))
        table.add_row(*map(Text, row), Text(why, style="red"))
    return Group(table, Text("\n".join(_versions(answer)), style="dim"))


def _versions(answer: AskResult) -> list[str]:
    """Return what the workers run, a line for each version, with the names if they differ."""
    running: dict[str, list[str]] = {}
    for report in answer.reports:
        running.setdefault(report.versions, []).append(report.name)
    if len(running) == 1:
        return [f"versions: {one}" for one in running]
    return [f"versions: {one}: {', '.join(names)}" for one, names in sorted(running.items())]


def _paths(report: WorkerReport) -> str:
    """Return the kind of path to each other worker; to how many, if they are many."""
    kinds = {
        one.name: one.path.partition(" ")[0]
        for one in report.members
        if one.path and not one.loss_cause
    }
    if len(kinds) <= MOST_NAMES:
        return " ".join(f"{name}={kind}" for name, kind in kinds.items())
    return " ".join(f"{count}*{kind}" for kind, count in Counter(kinds.values()).most_common())


def _row(report: WorkerReport) -> list[str]:
    held = report.references.get("owned", 0) + report.references.get("held", 0)
    return [
        report.name,
        report.role or "-",  # so that each row has as many words for awk
        str(report.id),
        report.host,
        str(report.pid),
        report.state,
        _duration(report.age),
        str(len(report.calls)),
        str(len(report.served)),
        str(sum(call.state == "is queued" for call in report.served)),
        str(report.received - len(report.served)),
        f"{report.memory / 1e6:.0f} MB",
        "{}/{}".format(*report.descriptors),
        str(held),
        _paths(report),
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
