"""Groups and commands in a terminal: colours, and the Ctrl-C that a terminal sends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from causes import CAUSES, causes, hanging
from launching import LAUNCH, environment, written
from patience import PATIENCE

# Makes its own stdin the terminal of a session of its own, as a terminal emulator does.
LOGIN = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
CTRL_C = b"\x03"


class Terminal:
    """The side of a terminal at which a person sits, and the program on the other one."""

    def __init__(self, leader: int, process: subprocess.Popen[bytes]) -> None:
        self._leader = leader
        self._process = process
        self._data = b""

    @property
    def shown(self) -> str:
        """All that was shown so far, or since `clear`."""
        text = self._data.decode(errors="replace")
        return text.replace("\r\n", "\n").replace("^C", "")

    def clear(self) -> None:
        self._data = b""

    def read_until(self, pattern: str) -> str:
        """Read until the shown text matches; return that part of it."""
        while (found := re.search(pattern, self.shown)) is None:
            assert self._read(), f"{pattern!r} did not come: {self.shown}"
        return found[0]

    def press_ctrl_c(self) -> None:
        os.write(self._leader, CTRL_C)

    def read_to_the_end(self) -> int:
        """Read all that is shown, and return the exit code of the program."""
        while self._read():
            pass
        return self._process.wait(PATIENCE)

    def _read(self) -> bool:
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # all that had the other side open have ended
            return False
        self._data += data  # it may be cut anywhere
        return bool(data)


@contextmanager
def in_terminal(*command: str, **more: str) -> Iterator[Terminal]:
    """Run a command in a terminal of its own; it is ended with the block."""
    leader, follower = os.openpty()
    variables = environment(TERM="xterm-256color", COLUMNS="120")
    variables.pop("NO_COLOR", None)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", LOGIN, *command],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=variables | more,
        ) as process:
            os.close(follower)
            try:
                yield Terminal(leader, process)
            finally:
                process.kill()
    finally:
        os.close(leader)


GROUP = """
import signal

import farcall


def wait(name):
    print("hello", name)
    while True:
        signal.pause()


if __name__ == "__main__":
    with farcall.local(2) as group:
        group.all.call(print, "ready")
        group.all.call(wait, "you")
"""
PREFIX = r"\x1b\[\d+m{} \| \x1b\[0m{}\n"


def test_group_in_a_terminal_has_colours_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    with in_terminal(sys.executable, str(written(tmp_path, GROUP)), TMPDIR=str(tmp_path)) as screen:
        for name in ("worker0", "worker1"):
            screen.read_until(PREFIX.format(name, "hello you"))
        screen.press_ctrl_c()
        assert screen.read_to_the_end() != 0
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in screen.shown.splitlines()]
    assert [line for line in lines if "Traceback" in line] == ["Traceback (most recent call last):"]
    assert lines[-1] == "KeyboardInterrupt"
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


LAUNCHED = """
import signal
try:
    print("ready", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("interrupted")
    raise SystemExit(1)
"""


def test_launcher_in_a_terminal_has_colours_and_hands_ctrl_c_on_once(tmp_path: Path) -> None:
    with in_terminal(*LAUNCH, "-n", "2", str(written(tmp_path, LAUNCHED))) as screen:
        for name in ("worker0", "worker1"):
            screen.read_until(PREFIX.format(name, "ready"))
        screen.press_ctrl_c()
        assert screen.read_to_the_end() == 130
    for name in ("worker0", "worker1"):
        assert len(re.findall(PREFIX.format(name, "interrupted"), screen.shown)) == 1
    assert "Traceback" not in screen.shown


def test_no_colours_where_none_are_wanted(tmp_path: Path) -> None:
    program = str(written(tmp_path, "print('ready')"))
    with in_terminal(*LAUNCH, "-n", "2", program, NO_COLOR="1") as screen:
        assert screen.read_to_the_end() == 0
    assert sorted(screen.shown.splitlines()) == ["worker0 | ready", "worker1 | ready"]


WATCH = (sys.executable, "-m", "farcall", "status", "--watch", "--timeout", str(PATIENCE))
ROWS = r"(?s)queued.*?\nw0 .*?\nw1 .*?\nw2 .*?versions: "


def test_status_is_shown_anew_in_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    with hanging("lock_held", tmp_path) as pid:
        causes(pid, *CAUSES["lock_held"])
        with in_terminal(*WATCH, "--group", str(pid)) as screen:
            for _ in range(2):
                screen.read_until(ROWS)
                screen.clear()
            screen.press_ctrl_c()
            assert screen.read_to_the_end() == 130
        assert "Traceback" not in screen.shown


@pytest.mark.parametrize(
    ("options", "beginning"), [((), "worker "), (("--json",), "{")], ids=["table", "json"]
)
def test_status_is_printed_anew_into_a_pipe(
    tmp_path: Path, options: Sequence[str], beginning: str
) -> None:
    with hanging("lock_held", tmp_path) as pid:
        causes(pid, *CAUSES["lock_held"])
        command = [*WATCH, "--group", str(pid), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                seen = 0
                for line in running.stdout:
                    seen += line.startswith(beginning)
                    if seen == 2:
                        break
                assert seen == 2
            finally:
                running.kill()
