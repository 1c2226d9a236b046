"""The speed of `farcall stacks`: the cause of each hang within two seconds, in five lines."""

from __future__ import annotations

import subprocess
import sys
import time

from causes import CAUSES, LINES, causes, hanging, is_named
from report import Report, Settings

ALLOWED = 2.0  # seconds
COMMANDS = ("stacks", "doctor")


def trial(report: Report, settings: Settings) -> None:
    for name, words in CAUSES.items():
        folder = settings.folder / name
        folder.mkdir()
        with hanging(name, folder) as pid:
            causes(pid, *words)  # it hangs by now
            for command in COMMANDS:
                began = time.monotonic()
                done = subprocess.run(
                    [sys.executable, "-m", "farcall", command, "--group", str(pid)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                took = time.monotonic() - began
                is_met = is_named(done.stdout.splitlines()[:LINES], words) and took <= ALLOWED
                report.demand(f"{command} names {name}", f"{took:.2f} s", is_met)
