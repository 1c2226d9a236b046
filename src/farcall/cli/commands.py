"""The command `farcall` and its subcommands: one module per group, listed in `COMMANDS`.

Exit codes: 0 success, 1 failure, 2 bad usage, 130 ended by Ctrl-C. A command may add its own.
"""

from __future__ import annotations

import os
import sys

import click

from farcall.cli.lazy import LazyGroup

COMMANDS = {
    "demo": ("farcall.cli.demo:demo", "Run a demo, or list them."),
    "doctor": (
        "farcall.cli.doctor:doctor",
        "Name the faults of this machine, its workers and their paths.",
    ),
    "launch": (
        "farcall.cli.launch:launch",
        "Start workers, or one program for torch.distributed.rpc.",
    ),
    "metrics": ("farcall.cli.metrics:metrics", "Print or serve metrics of workers for Prometheus."),
    "secret": ("farcall.cli.secret:secret", "Make a secret that workers share."),
    "stacks": ("farcall.cli.stacks:stacks", "Say what hangs, and show where all threads are."),
    "status": ("farcall.cli.status:status", "Show which workers there are, and what they do."),
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="farcall")
def cli() -> None:
    """Remote calls, remote references and gradients across processes for PyTorch."""


def run() -> int:
    """Run the command line and return the exit code."""
    try:
        code = cli.main(prog_name="farcall", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of our output is gone, as in `farcall demo | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0
