"""The `farcall` command; it needs the extra `cli`. `commands.py` lists its subcommands."""

from __future__ import annotations

import sys
from importlib import import_module

NEEDS = ("click", "rich")


def main() -> int:
    """Run the command `farcall` and return its exit code: 1 if the extra `cli` is not installed."""
    try:
        code: int = import_module("farcall.cli.commands").run()
        return code
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in NEEDS:
            raise
        print(
            f"Error: the farcall command needs {name}, which is not installed. "
            "Install it with: pip install 'farcall[cli]'",
            file=sys.stderr,
        )
        return 1
