"""The commit of this checkout, and whether the files are those of the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Checkout(NamedTuple):
    """The state of a checkout at one moment. Without git, both say nothing: None and False."""

    commit: str | None
    is_clean: bool


def state_of(root: Path = ROOT) -> Checkout:
    """Return the commit, and whether all files are as it has them, but those that git ignores."""
    commit, status = (
        _git(root, *arguments) for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    )
    return Checkout(commit, commit is not None and status == "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
