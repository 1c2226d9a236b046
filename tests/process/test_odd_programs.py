"""Programs that are set up in odd ways start workers, hear how these end, and end themselves.

Each oddity has a program of its own, which names it. Where the oddity is something that a new
process inherits, or that an import can meet, a start by a zygote shows less than a real one (see
`tests/zygote.py`): one program that starts for real has all of these at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest
from launching import LAUNCH, environment, written
from patience import PATIENCE

PROGRAM = """
import os
import resource
import signal
import sys
import threading
import time
import traceback


def tell(*error):
    with open(sys.argv[1], "w") as file:
        traceback.print_exception(*error, file=file)


{first}

import farcall
from farcall import rpc


def say(word):
    print(word)
    return word


def die():
    os._exit(7)


if __name__ == "__main__":
    sys.excepthook = tell  # stderr may be closed
{before}
    with farcall.local(2) as group:
        assert group[0].call(say, "one") == "one"
        try:
            group[1].call(die)
        except rpc.PeerLost:
            pass
        while group[1].ended is None:
            time.sleep(0.01)
        ended = group[1].ended
        assert group[0].call(say, "two") == "two"
    with open(sys.argv[1], "w") as file:
        file.write(ended)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # Python itself minds odd ones
"""

# Actions of a program before it imports farcall, in workers too.
FIRST = {
    "paths on sys.path": """
        import pathlib
        sys.path.insert(0, pathlib.Path("/tmp"))
        """,
    "all is traced": """
        def trace(frame, event, argument):
            return trace
        threading.settrace(trace)
        sys.settrace(trace)
        """,
}

# Actions of a program before it starts workers.
BEFORE = {
    "stdout can write only": """
        class Log:
            def write(self, text):
                sys.__stdout__.write(text)
        sys.stdout = Log()
        """,
    "stdout raises": """
        class Log:
            def write(self, text):
                raise RuntimeError("no")
        sys.stdout = sys.stderr = Log()
        """,
    "there is no stdout": "sys.stdout = sys.stderr = None",
    "its children are ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "another reaps its children": """
        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        signal.signal(signal.SIGCHLD, reap)
        """,
    "signals are blocked": """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        """,
    "few descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "a strict umask": "os.umask(0o777)",
}

# A stream that its parent has closed: the next descriptor that is opened gets its number. The
# environment is empty, too, and lacks what Python reads early, so the server of forks starts for
# real.
CLOSED = {"stdin": 0, "stdout": 1, "stderr": 2}
CLOSE = """
    os.environ.clear()
    sys.{name} = sys.__{name}__ = None
    os.close({number})
"""

# A real start, after which all that can be is odd at once: all three streams are closed, too.
SHELL = 'umask 0777; ulimit -n 64; exec "$@" <&- >&- 2>&-'


def check_run(
    folder: Path, first: str = "", before: str = "", shell: str = "", **more: str
) -> None:
    """Run the program to its end, from a shell if there are words for one.

    It has to hear how its worker ended.
    """
    script = folder / "script.py"
    text = PROGRAM.format(first=dedent(first), before=indent(dedent(before), "    "))
    script.write_text(text, encoding="utf-8")
    told = folder / "told"
    command = [sys.executable, str(script), str(told)]
    done = subprocess.run(
        ["bash", "-c", shell, "bash", *command] if shell else command,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if told.exists():
        told.chmod(0o600)
    assert done.returncode == 0, done.stderr + (told.read_text() if told.exists() else "")
    assert told.read_text() == "exit code 7"


def named(folder: Path) -> Path:
    """Make a folder for temporary files with an odd name."""
    made = folder / "\xe4 b%20c#d?e"
    made.mkdir()
    return made


@pytest.mark.parametrize("case", FIRST)
def test_a_program_that_has_changed_python_starts_workers(case: str, tmp_path: Path) -> None:
    check_run(tmp_path, first=FIRST[case])


@pytest.mark.parametrize("case", BEFORE)
def test_a_program_that_has_changed_its_process_starts_workers(case: str, tmp_path: Path) -> None:
    check_run(tmp_path, before=BEFORE[case])


@pytest.mark.parametrize("name", CLOSED)
def test_a_program_with_no_environment_and_a_closed_stream_starts_workers(
    name: str, tmp_path: Path
) -> None:
    check_run(tmp_path, before=CLOSE.format(name=name, number=CLOSED[name]))


def test_a_folder_for_temporary_files_may_have_any_name(tmp_path: Path) -> None:
    folder = named(tmp_path)
    check_run(tmp_path, TMPDIR=str(folder))
    assert not list(folder.iterdir())


def test_a_program_that_starts_for_real_with_many_oddities_starts_workers(tmp_path: Path) -> None:
    """Start with all of them that can be combined: it and its workers' server import torch so."""
    folder = named(tmp_path)
    first = "sys.excepthook = tell\n" + "".join(map(dedent, FIRST.values()))
    before = BEFORE["its children are ignored"] + "\n" + dedent(BEFORE["signals are blocked"])
    check_run(tmp_path, first, before, SHELL, TMPDIR=str(folder))
    assert not list(folder.iterdir())


FAILS = "import os, sys; sys.exit(int(os.environ['RANK']) and 7)"
IGNORES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_launcher_whose_parent_ignores_children_hears_how_workers_end(tmp_path: Path) -> None:
    program = str(written(tmp_path, FAILS))
    done = subprocess.run(
        [sys.executable, "-c", IGNORES, *LAUNCH, "-n", "2", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "worker1 (rank 1) failed: exit code 7" in done.stderr
