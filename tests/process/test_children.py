"""`farcall.processes`: what children print, how they ended, and that none is left."""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from patience import PATIENCE

from farcall.processes import exits, forkserver
from farcall.processes.dying import Guardian, signal_group, start, wait_for_group
from farcall.processes.output import KEPT_LINES, LONGEST_LINE, Output


class Shown:
    """An `Output` and the two streams that it writes to."""

    def __init__(self, folder: Path | None = None, out: io.StringIO | None = None) -> None:
        self.out, self.err = out or io.StringIO(), io.StringIO()
        self.output = Output(self.out, self.err, folder)

    def run(self, name: str, program: str) -> None:
        """Run a Python program under a name until all that it printed is shown."""
        child = start([sys.executable, "-c", program], os.environ)
        self.output.follow_process(name, child)
        wait_for_group(child)
        assert self.output.wait(name, PATIENCE)


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    yield made
    made.output.close()


def test_each_line_has_the_name_before_it(shown: Shown) -> None:
    shown.run("w0", "import sys; print('one\\ntwo'); print('wrong', file=sys.stderr)")
    assert shown.out.getvalue() == "w0 | one\nw0 | two\n"
    assert shown.err.getvalue() == "w0 | wrong\n"


def test_a_line_without_an_end_is_shown_at_the_end(shown: Shown) -> None:
    shown.run("w0", "print('whole'); print('part', end='')")
    assert shown.out.getvalue() == "w0 | whole\nw0 | part\n"
    assert shown.output.logs("w0") == ["whole", "part"]


def test_a_line_that_never_ends_is_shown_in_pieces(shown: Shown) -> None:
    shown.run("w0", f"print('x' * {10 * LONGEST_LINE}, end='')")
    pieces = shown.output.logs("w0")
    assert "".join(pieces) == "x" * 10 * LONGEST_LINE
    assert len(pieces) > 1


def test_of_a_progress_bar_the_last_state_is_shown(shown: Shown) -> None:
    shown.run("w0", "print('1 %\\r50 %\\r100 %')")
    assert shown.out.getvalue() == "w0 | 100 %\n"


def test_bytes_that_are_no_text_are_shown_all_the_same(shown: Shown) -> None:
    shown.run("w0", "import os; os.write(1, b'a\\xffb\\n')")
    assert shown.out.getvalue() == "w0 | a\ufffdb\n"


def test_a_terminal_that_knows_ascii_only_gets_escapes() -> None:
    raw = io.BytesIO()
    shown = Shown(out=io.TextIOWrapper(raw, encoding="ascii"))  # type: ignore[arg-type]
    shown.run("w0", "import os; os.write(1, 'ä\\n'.encode())")
    shown.output.close()
    assert raw.getvalue() == b"w0 | \\xe4\n"


def test_names_have_colours_of_their_own_in_a_terminal(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = Shown()
    coloured.run("w0", "print('one')")
    coloured.run("w1", "print('two')")
    coloured.output.close()
    first, second = coloured.out.getvalue().splitlines()
    assert first.endswith("one")
    assert first.split("w0")[0] != second.split("w1")[0]
    assert "\x1b[" in first


def test_last_lines_are_kept(shown: Shown) -> None:
    shown.run("w0", f"for i in range({KEPT_LINES + 5}): print(i)")
    assert shown.output.logs("w0", 2) == [str(KEPT_LINES + 3), str(KEPT_LINES + 4)]
    assert len(shown.output.logs("w0")) == KEPT_LINES
    assert shown.output.logs("w0", 0) == []
    with pytest.raises(KeyError):
        shown.output.logs("w1")


def test_logs_go_to_files_and_go_on_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "w0.log").write_text("of another run\n")
    shown = Shown(tmp_path)
    shown.run("w0", "print('one')")
    shown.run("w0", "import sys; print('two', file=sys.stderr)")
    shown.run("../x", "print('three')")
    shown.output.close()
    assert (tmp_path / "w0.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "..%2Fx.log").read_text() == "three\n"


def test_children_go_on_when_no_thread_reads_their_output() -> None:
    out = io.StringIO()
    out.close()
    shown = Shown(out=out)
    shown.run("w0", "print('one')\nprint('two')")
    shown.output.close()
    assert shown.output.logs("w0") == ["one", "two"]


class Stream:
    """A stand-in for `sys.stdout` that has `write` and nothing else, as many loggers have."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text


class RaisingStream(Stream):
    """Raises an error in each of its methods."""

    def write(self, text: str) -> None:
        raise RuntimeError("no")

    def isatty(self) -> bool:
        raise RuntimeError("no")


class UnflushedStream(Stream):
    def flush(self) -> None:
        raise KeyError("no")


class AsciiStream(Stream):
    def write(self, text: str) -> None:
        text.encode("ascii")
        super().write(text)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (Stream, "w0 | one\nw0 | \xe4\n"),
        (AsciiStream, "w0 | one\nw0 | \\xe4\n"),
        (UnflushedStream, "w0 | one\n"),
        (RaisingStream, ""),
    ],
)
def test_the_stand_in_for_stdout_may_be_any_object(kind: type[Stream], written: str) -> None:
    out = kind()
    shown = Shown(out=out)  # type: ignore[arg-type]  # nor have users' objects the right type
    shown.run("w0", "print('one', flush=True)")
    shown.run("w0", "import os; os.write(1, '\xe4\\n'.encode())")
    shown.output.catch_up()
    shown.output.close()
    assert shown.output.logs("w0") == ["one", "\xe4"]
    assert out.written == written


def test_a_grandchild_with_the_pipe_holds_up_no_thread() -> None:
    shown = Shown()
    ours, theirs = os.pipe()
    shown.output.follow("w0", ours)
    os.write(theirs, b"written")
    assert not shown.output.wait("w0", 0.0)
    shown.output.close()
    os.close(theirs)
    assert shown.out.getvalue() == "w0 | written\n"


RAISES = """
import logging
try:
    1 / 0
except Exception:
    logging.exception("harmless")
print("between", file=__import__("sys").stderr)
try:
    {}["key"]
except KeyError as error:
    raise ValueError("at last") from error
"""


def test_last_words_are_the_last_traceback_with_its_causes(shown: Shown) -> None:
    shown.run("w0", RAISES)
    words = shown.output.last_words("w0")
    assert words[0] == "Traceback (most recent call last):"
    assert "KeyError: 'key'" in words
    assert words[-1] == "ValueError: at last"
    assert not any("ZeroDivisionError" in line for line in words)


def test_last_words_without_a_traceback_are_the_last_lines(shown: Shown) -> None:
    shown.run("w0", "for i in range(30): print(i)")
    assert shown.output.last_words("w0", 2) == ["28", "29"]


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (0, None, "exit code 0"),
        (3, None, "exit code 3"),
        (-9, None, "killed by SIGKILL: out of memory?"),
        (-9, 0, "killed by SIGKILL: out of memory? (the kernel counts no such kill)"),
        (-9, 2, "killed by SIGKILL: out of memory (the kernel counts 2 such kills)"),
        (-15, 1, "killed by SIGTERM"),
        (-11, None, "killed by SIGSEGV: a crash in compiled code"),
        (-40, None, "killed by signal 40"),
    ],
)
def test_ends_in_words(code: int, kills: int | None, words: str) -> None:
    assert exits.in_words(code, kills) == words


def test_exit_status_is_that_of_a_shell() -> None:
    assert [exits.exit_status(code) for code in (0, 3, -9)] == [0, 3, 137]


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/job\n", "memory.events"),
        ("9:cpu:/\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
    ],
)
def test_kills_for_lack_of_memory_are_counted(
    groups: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    counter = tmp_path / "sys/fs/cgroup" / file
    counter.parent.mkdir(parents=True)
    counter.write_text("oom 0\noom_kill 4\n")
    monkeypatch.setattr(exits, "ROOT", tmp_path)
    kills = exits.MemoryKills()
    assert kills.since() == 0
    counter.write_text("oom 0\noom_kill 6\n")
    assert kills.since() == 2


def test_no_counter_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "ROOT", tmp_path)
    assert exits.MemoryKills().since() is None


HIGH = """
import fcntl, os, resource
from farcall.processes import forkserver
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
reader, writer = os.pipe()
high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1500)
print(forkserver._readable([high], 0.0))
os.close(writer)
print(forkserver._readable([high]) == {high})
"""


def test_fork_server_waits_for_descriptors_of_many_workers() -> None:
    done = subprocess.run([sys.executable, "-c", HIGH], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["set()", "True"], done.stderr


def test_fork_server_kills_a_child_that_leads_no_group_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a child that never comes to the first line of a worker."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "def run(place, plan, parent):\n"
        "    os.write(place.out, b'forked')\n"
        "    while True:\n"
        "        signal.pause()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = socket.socketpair()
    out, its_out = os.pipe()
    its_err, its_connection = (os.open(os.devnull, os.O_WRONLY) for _ in range(2))
    inherited = (theirs.fileno(), its_out, its_err, its_connection)
    command = forkserver.command(theirs.fileno(), "slow", str(tmp_path / "of the driver"))
    with subprocess.Popen(command, pass_fds=inherited) as server, ours:
        theirs.close()
        for descriptor in inherited[1:]:
            os.close(descriptor)
        home = Connection(ours.detach())
        assert home.recv_bytes() == forkserver.WARM
        places = [forkserver.ChildDescriptors("w0", its_out, its_err, its_connection)]
        home.send_bytes(pickle.dumps((places, None)))
        assert os.read(out, 6) == b"forked"
        home.send_bytes(forkserver.KILL)
        assert ends(out)
        assert server.wait(PATIENCE) == 0
        home.close()
    os.close(out)


PARENT = """
import os, sys
from farcall.processes.dying import Guardian, start
guardian = Guardian()
child = start([sys.executable, "-c", sys.argv[1]], os.environ, stdout=None, stderr=None)
guardian.watch(child.pid)
os.write(1, b"p")
sys.stdin.read()
"""
# All three hold this pipe until they end: the parent, its child, and a grandchild in the group.
CHILD = """
import os, signal, time
if os.fork() == 0:
    os.write(1, b"g")
else:
    os.write(1, b"c")
while True:
    signal.pause()
"""


def test_children_and_grandchildren_end_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert {os.read(parent.stdout.fileno(), 1) for _ in range(3)} == {b"p", b"c", b"g"}
    parent.kill()
    assert ends(parent.stdout.fileno())
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()


def ends(descriptor: int) -> bool:
    """Return whether all who could write to this pipe end."""
    ready, _, _ = select.select([descriptor], [], [], PATIENCE)
    return bool(ready) and os.read(descriptor, 1) == b""


def test_the_group_of_a_process_ends_with_it() -> None:
    child = start([sys.executable, "-c", CHILD], os.environ, stderr=None)
    assert child.stdout is not None
    assert {os.read(child.stdout.fileno(), 1) for _ in range(2)} == {b"c", b"g"}
    os.kill(child.pid, signal.SIGTERM)
    assert wait_for_group(child) == -signal.SIGTERM
    assert ends(child.stdout.fileno())
    child.stdout.close()


def test_released_processes_are_left_alone() -> None:
    guardian = Guardian()
    child = start([sys.executable, "-c", CHILD], os.environ, stderr=None)
    assert child.stdout is not None
    guardian.watch(child.pid)
    guardian.release(child.pid)
    guardian.close()
    assert child.poll() is None
    signal_group(child.pid, signal.SIGKILL)
    assert wait_for_group(child) == -signal.SIGKILL
    child.stdout.close()
