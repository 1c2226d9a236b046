"""`farcall launch`: start the workers of a group, on this machine, by ssh or under srun."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from farcall.cli.options import Seconds
from farcall.processes.output import Output
from farcall.processes.places import (
    NO_ROLE,
    Meeting,
    Place,
    Role,
    SlurmTask,
    Span,
    places_in,
    slurm_task,
    spans_over,
    variables,
)
from farcall.processes.supervisor import Launched, Rules, Supervisor
from farcall.processes.workers import Starter
from farcall.runtime.options.credential import FILE_VARIABLE, VARIABLE
from farcall.runtime.options.secret import Secret

BOOT = Path(__file__).parents[1] / "compat" / "boot"
LOOPBACK = "127.0.0.1"
EVERYWHERE = ""
# Of a job of Slurm: below the ports that systems give to clients.
FIRST_PORT, PORTS = 20000, 10000


class LaunchPlan(NamedTuple):
    """A plan: the workers that this launcher starts, and the place where all of them meet.

    Attributes:
        places: of the workers that are started here.
        hosts: where each of them runs: for ssh, or None for this machine.
        meeting: host and port for the workers; port 0 if it is free to be chosen.
        hosts_store: whether this launcher starts the store.
    """

    places: Sequence[Place]
    hosts: Sequence[str | None]
    meeting: Meeting
    hosts_store: bool


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    help="Workers to start; with --hosts on each host, under srun in each task.  [default: 1]",
)
@click.option(
    "--role",
    "roles",
    metavar="NAME:COUNT",
    multiple=True,
    callback=lambda context, option, values: [_role(value) for value in values],
    help="In place of -n: COUNT workers of the role NAME, in all. May be given several times; "
    "ranks are given in this order.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module.")
@click.option(
    "--hosts",
    metavar="A,B,...",
    help="Start the workers on these hosts by ssh, which must not ask for a password. Python, "
    "farcall and PROGRAM are in the same places there as here.",
)
@click.option(
    "--address",
    metavar="HOST",
    help="Under which name or address workers reach the first host.  [default: its name]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="At which port of the first host workers meet.  [default: any; under srun by the job]",
)
@click.option(
    "--restart",
    "restarts",
    type=click.IntRange(min=0),
    metavar="TIMES",
    default=0,
    help="Start a worker that fails again, so many times; the others go on. Workers then come "
    "and go: init_rpc does not wait for all.",
)
@click.option(
    "--restart-delay",
    type=Seconds(),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Before a worker's first restart; each later one takes twice as long, up to 60.",
)
@click.option(
    "--grace",
    type=Seconds(),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Time that workers get to end by themselves when all are to end; then they are killed.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write what each worker prints to a file of its own here, too.",
)
@click.option(
    "--compat",
    is_flag=True,
    help="Let torch.distributed.rpc be farcall, in the program and in all that it starts.",
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    context: click.Context,
    *,
    workers: int | None,
    roles: list[Role],
    module: bool,
    hosts: str | None,
    address: str | None,
    port: int | None,
    restarts: int,
    restart_delay: float,
    grace: float,
    log_dir: Path | None,
    compat: bool,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Start workers that each run PROGRAM, a Python script, with ARGUMENTS.

    \b
        farcall launch -n 4 train.py --rate 0.1
        farcall launch --role ps:1 --role trainer:3 train.py
        farcall launch --hosts node1,node2 -n 4 -m package.train

    Each line that a worker prints is shown with its name. If one fails, all are ended, and the
    failed one's traceback is shown last. Ctrl-C ends all; the second one at once.

    Workers find what torchrun sets in their environment: RANK, WORLD_SIZE, LOCAL_RANK, ROLE_NAME,
    MASTER_ADDR and so on; with --role also FARCALL_ROLE, and the worker's own number of restarts
    in FARCALL_RESTART_COUNT. They share a secret of their own, unless FARCALL_SECRET or
    FARCALL_SECRET_FILE is set.

    Under srun each task starts its part of the workers. The secret must be set there.

    With --compat PROGRAM runs on farcall unchanged if it is written for torch.distributed.rpc, and
    so do Python processes that it starts, in whatever way: they inherit FARCALL_COMPAT=1 and a
    folder of farcall's on PYTHONPATH. If it is to be one process, that takes the place of this
    one, with its terminal, and nothing else is set.

    Exit codes: that of the worker that failed, 128 and the number if a signal killed it, 130 after
    Ctrl-C.
    """
    if roles and workers is not None:
        raise click.UsageError("give -n or --role, not both")
    if len({role.name for role in roles}) < len(roles):
        raise click.BadParameter("each role once", param_hint="'--role'")
    if not module and not hosts and not Path(program).is_file():
        raise click.UsageError(f"there is no file {program!r}; if it is a module, say -m before it")
    command = [sys.executable, *(["-m"] if module else []), program, *arguments]
    task = _task_of_slurm()
    if compat and not (workers or 1) > 1 and not any((roles, hosts, task, restarts, log_dir)):
        _become(context, command, {**os.environ, **_compat_variables()})
        return
    if hosts and task:
        raise click.UsageError("--hosts is not for use under srun, which knows the hosts")
    if hosts:
        plan = plan_for_hosts(_names_of(hosts), workers or 1, roles, address, port or 0)
    elif task:
        plan = plan_for_slurm(task, workers or 1, roles, address, port)
    else:
        every = roles or [Role(NO_ROLE, workers or 1)]
        size = sum(role.size for role in every)
        places = places_in(Span(0, size, 0, size, 0), every, size, 1)
        plan = LaunchPlan(places, [None] * size, Meeting(LOOPBACK, port or 0), hosts_store=True)
    more = {**_shared(plan, elastic=restarts > 0), **(_compat_variables() if compat else {})}
    rules = Rules(restarts, restart_delay, grace)
    context.exit(_run(plan, command, more, rules, log_dir))


def plan_for_hosts(
    hosts: Sequence[str], each: int, roles: Sequence[Role], address: str | None, port: int
) -> LaunchPlan:
    """Return the plan of a launcher that starts all workers by ssh."""
    every = roles or [Role(NO_ROLE, each * len(hosts))]
    size = sum(role.size for role in every)
    if size < len(hosts):
        raise click.UsageError(f"{len(hosts)} hosts are too many for {size} workers")
    places: list[Place] = []
    at: list[str | None] = []
    for host, span in zip(hosts, spans_over(len(hosts), size), strict=True):
        places += places_in(span, every, size, len(hosts))
        at += [host] * span.size
    first = address or hosts[0].rpartition("@")[2]
    return LaunchPlan(places, at, Meeting(first, port), hosts_store=True)


def plan_for_slurm(
    task: SlurmTask, each: int, roles: Sequence[Role], address: str | None, port: int | None
) -> LaunchPlan:
    """Return the plan of a launcher that is one task of srun."""
    total = sum(role.size for role in roles)
    if total % task.size:
        raise click.UsageError(f"{total} workers can't be shared among {task.size} tasks of srun")
    each = total // task.size or each
    size = each * task.size
    span = Span(task.rank * each, each, task.local_rank * each, task.local_size * each, task.node)
    places = places_in(span, roles or [Role(NO_ROLE, size)], size, task.nodes)
    meeting = Meeting(
        address or task.first_host,
        FIRST_PORT + task.job % PORTS if port is None else port,
    )
    return LaunchPlan(places, [None] * each, meeting, hosts_store=task.rank == 0)


def _run(
    plan: LaunchPlan,
    command: Sequence[str],
    more: dict[str, str],
    rules: Rules,
    folder: Path | None,
) -> int:
    # Where this is ignored, as a parent may hand it on, Linux keeps no exit codes of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        output = Output(folder=folder)
    except OSError as error:
        reason = f"can't create the folder {folder}: {error.strerror}"
        raise click.BadParameter(reason, param_hint="'--log-dir'") from None
    starter = Starter(output)
    try:
        store, meeting = None, plan.meeting
        if plan.hosts_store:
            is_local = meeting.host == LOOPBACK
            listen = Meeting(LOOPBACK if is_local else EVERYWHERE, meeting.port)
            store, port = starter.start_store(plan.hosts[0], listen)
            meeting = meeting._replace(port=port)
        run_id = more.pop("TORCHELASTIC_RUN_ID")
        workers = [
            Launched(place, host, {**more, **variables(place, meeting, run_id, rules.restarts)})
            for place, host in zip(plan.places, plan.hosts, strict=True)
        ]
        return Supervisor(workers, command, starter, output, rules, _say).run(store)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    finally:
        starter.close()
        output.close()


def _shared(plan: LaunchPlan, *, elastic: bool) -> dict[str, str]:
    """Return the variables that all workers have in common."""
    found = {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_RUN_ID": secrets.token_hex(8)}
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun
    if plan.places[0].local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = "1"  # as torchrun
    if elastic:
        found["FARCALL_ELASTIC"] = "1"
    if os.environ.get(VARIABLE):
        found[VARIABLE] = os.environ[VARIABLE]
    elif not os.environ.get(FILE_VARIABLE):
        found[VARIABLE] = Secret.generate().reveal().decode()
    if plan.meeting.host == LOOPBACK and "FARCALL_LISTEN" not in os.environ:
        found["FARCALL_LISTEN"] = LOOPBACK
    return found


def _task_of_slurm() -> SlurmTask | None:
    try:
        task = slurm_task(os.environ)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if task and not os.environ.get(VARIABLE) and not os.environ.get(FILE_VARIABLE):
        raise click.UsageError(
            f"the tasks of srun need one secret: in the script of the job, before srun, say "
            f"export {VARIABLE}=$(farcall secret), or set {FILE_VARIABLE} to a file that all see"
        )
    return task


def _role(text: str) -> Role:
    match = re.fullmatch(r"([A-Za-z][\w-]*):([1-9]\d*)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no name and number, as in trainer:3")
    return Role(match[1], int(match[2]))


def _names_of(hosts: str) -> list[str]:
    names = [name.strip() for name in hosts.split(",")]
    for name in names:
        # ssh would take what begins with a dash for an option.
        if not re.fullmatch(r"[\w@.:\[\]%][\w@.:\[\]%-]*", name):
            raise click.BadParameter(f"{name!r} is no name of a host", param_hint="'--hosts'")
    return names


def _compat_variables() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    path = str(BOOT) if not before else f"{BOOT}{os.pathsep}{before}"
    return {"PYTHONPATH": path, "FARCALL_COMPAT": "1"}


def _become(context: click.Context, command: list[str], environment: dict[str, str]) -> None:
    if os.name == "posix":
        os.execve(sys.executable, command, environment)
    context.exit(subprocess.run(command, env=environment, check=False).returncode)


def _say(text: str) -> None:
    first, _, rest = text.partition("\n")
    with contextlib.suppress(OSError):  # as in `Output`: its reader may have gone
        click.secho(f"farcall launch: {first}", err=True, bold=True)
        if rest:
            click.echo(rest, err=True)
