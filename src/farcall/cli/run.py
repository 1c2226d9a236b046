"""`farcall run`: run a Python program with farcall in the place of torch.distributed.rpc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

BOOT = Path(__file__).parents[1] / "compat" / "boot"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--compat",
    is_flag=True,
    help="Let torch.distributed.rpc be farcall, in the program and in all that it starts.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context, compat: bool, module: bool, program: str, arguments: tuple[str, ...]
) -> None:
    """Run PROGRAM, a Python script, with ARGUMENTS.

    With --compat it runs on farcall unchanged if it is written for torch.distributed.rpc. Python
    processes that it starts, in whatever way, do so, too: they inherit FARCALL_COMPAT=1 and a
    folder of farcall's on PYTHONPATH.
    """
    if not module and not Path(program).is_file():
        raise click.UsageError(f"there is no file {program!r}; if it is a module, say -m before it")
    environment = dict(os.environ)
    if compat:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(BOOT) if not before else f"{BOOT}{os.pathsep}{before}"
        environment["FARCALL_COMPAT"] = "1"
    command = [sys.executable, *(["-m"] if module else []), program, *arguments]
    if os.name == "posix":
        os.execve(sys.executable, command, environment)
    context.exit(subprocess.run(command, env=environment, check=False).returncode)
