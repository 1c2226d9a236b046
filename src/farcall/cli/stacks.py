"""`farcall stacks`: what workers wait for, and where each of their threads is."""

from __future__ import annotations

import shutil
import subprocess

import click
from rich.console import Console
from rich.text import Text

from farcall.cli.options import group_option, timeout_option
from farcall.monitor import AskResult, SilentWorker, ask_all, explain
from farcall.runtime.inspection.reports import CallReport, ThreadReport, WorkerReport
from farcall.transport.connect.handshake_messages import printable

SAMPLER_SECONDS = 10.0
MOST_SAMPLED = 8


@click.command()
@click.argument("workers", nargs=-1)
@group_option()
@timeout_option()
@click.option("--all", "everything", is_flag=True, help="Also threads that do nothing.")
def stacks(workers: tuple[str, ...], group: int | None, timeout: float, everything: bool) -> None:
    """Say what hangs and why, and show where the threads of all workers are, or of WORKERS.

    Of a worker that does not answer, because a function in C holds Python's lock (GIL) or the
    process is stopped, py-spy shows the threads if it is installed: pip install "farcall[stacks]".
    Workers are found as by `farcall status`.
    """
    try:
        answer = ask_all(stacks=True, timeout=timeout)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if group is not None:
        answer = answer.of_group(group)
    known = {one.name for one in answer.reports} | {one.name for one in answer.silent}
    unknown = [name for name in workers if name not in known]
    if unknown:
        there = ", ".join(sorted(filter(None, known))) or "none at all"
        raise click.ClickException(f"there is no worker {unknown[0]!r}; there are: {there}")
    console = Console(highlight=False, soft_wrap=True)
    _show_causes(console, answer)
    for report in answer.reports:
        if not workers or report.name in workers:
            _show_worker(console, report, everything)
    silent = [one for one in answer.silent if one.pid and (not workers or one.name in workers)]
    for one in silent[:MOST_SAMPLED]:
        _show_sampled(console, one)
    if silent[MOST_SAMPLED:]:
        console.print(f"\nand {len(silent) - MOST_SAMPLED} others that do not answer")


def _show_causes(console: Console, answer: AskResult) -> None:
    causes = explain(answer)
    for cause in causes:
        console.print(Text(cause, style="bold yellow"))
    if not causes:
        found = len(answer.reports)
        console.print(f"nothing hangs for longer than a second ({found} workers)")
    console.file.flush()  # a sampler may take its time


def _show_worker(console: Console, report: WorkerReport, everything: bool) -> None:
    console.print()
    console.print(
        Text(f"{report.name} (rank {report.id}, pid {report.pid} on {report.host})", "bold")
    )
    for thread in report.threads:
        if everything or not _is_idle(thread):
            _show_thread(console, thread)


def _is_idle(thread: ThreadReport) -> bool:
    waits = thread.waits_for or thread.awaits
    works = thread.serves or thread.loop
    return works is None and waits is None and thread.name != "MainThread"


def _show_thread(console: Console, thread: ThreadReport) -> None:
    what = [f"  thread {thread.name}"]
    if thread.serves is not None:
        what.append(f"runs `{thread.serves.function}` for {_told(thread.serves)}")
    if thread.waits_for is not None:
        what.append(f"waits for `{thread.waits_for.function}` on {_told(thread.waits_for)}")
    if thread.awaits is not None:
        what.append(f"waits since {thread.awaits.seconds:.1f} s {thread.awaits.what}")
    if thread.loop is not None:
        what.append(f"its event loop stands still since {thread.loop.seconds:.1f} s")
    console.print(Text(", ".join(what), "cyan"))
    for frame in thread.frames:
        console.print(Text(f"    {frame}"))


def _told(call: CallReport) -> str:
    since = "" if call.seconds is None else f" since {call.seconds:.1f} s"
    return f"{call.worker}{since}"


def _show_sampled(console: Console, silent: SilentWorker) -> None:
    console.print()
    console.print(Text(f"{silent.name or 'a worker'} (pid {silent.pid}): {silent.why}", "bold red"))
    sampler = shutil.which("py-spy")
    if sampler is None:
        console.print(Text('  py-spy shows its threads: pip install "farcall[stacks]"'))
        return
    # A process that is stopped stays so: py-spy reads its memory and stops nothing.
    command = [sampler, "dump", "--nonblocking", "--pid", str(silent.pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SAMPLER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        console.print(f"  py-spy gave nothing within {SAMPLER_SECONDS:g} s")
        return
    for line in (done.stdout or done.stderr).rstrip().splitlines():
        console.print(Text(printable(line)))
