"""Runs `farcall launch` for tests, with programs that are written for one test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import ports
from patience import PATIENCE

FARCALL = (sys.executable, "-c", "import sys; from farcall.cli import main; sys.exit(main())")
LAUNCH = (*FARCALL, "launch")
_CLEARED = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS"),
    *("FORCE_COLOR", "PYTHONUNBUFFERED"),
)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, without the variables of a launcher or a worker."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _CLEARED and not name.startswith(("FARCALL_", "SLURM_", "TORCHELASTIC_"))
    }
    return own | more


def launch(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    return subprocess.run(
        [*LAUNCH, *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@contextmanager
def launching(*arguments: str | Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Start the launcher; it is ended with the block."""
    with subprocess.Popen(
        [*LAUNCH, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def read_until(stream: IO[str] | None, text: str, times: int = 1) -> None:
    """Read lines until so many have had the text in them."""
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        times -= text in line
        if times == 0:
            return
    raise AssertionError(f"{text!r} did not come: {''.join(seen)}")


def written(folder: Path, text: str, name: str = "program.py") -> Path:
    """Write a program to a file."""
    path = folder / name
    path.write_text(text)
    return path


def free_port() -> str:
    """Return a port, see `ports`, as commands and the environment take it."""
    return str(ports.free_port())
