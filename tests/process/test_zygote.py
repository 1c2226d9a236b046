"""A warm start (tests/zygote.py) is as good as a real one: what a program can see is the same."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from warm_starts import HAS_ZYGOTES, Zygote
from zygote_jobs import BOOT

pytestmark = pytest.mark.skipif(not HAS_ZYGOTES, reason="TESTS_COLD, or no Linux")

# A zygote does not know -X, so that is a real start; the number is the one that Python has anyway.
COLD = (sys.executable, "-X", f"int_max_str_digits={sys.get_int_max_str_digits()}")
WARM = (sys.executable,)

SEES = """
import __main__, json, os, signal, sys, threading
import multiprocessing as mp

def lines_of(path):
    with open(path, "rb") as file:
        return [line.decode() for line in file.read().split(bytes(1)) if line]

def annotated(x: int): ...

seen = {
    "future": repr(annotated.__annotations__),
    "argv": sys.argv,
    "main": [__name__, globals().get("__file__"), __main__.__dict__ is globals()],
    "names": sorted(globals()),
    "package": __package__,
    "path": sys.path,
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "folder": os.getcwd(),
    "environment": {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"},
    "shown": sorted(x for x in lines_of("/proc/self/environ") if "PYTEST_CURRENT" not in x),
    "command": [x for x in lines_of("/proc/self/cmdline") if "-X" not in x and "_digits=" not in x],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) < 500),
    "handlers": [repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGPIPE)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": [thread.name for thread in threading.enumerate()],
    "native": threading.main_thread().native_id == os.getpid(),
    "processes": [mp.current_process().name, mp.parent_process()],
    "output": [sys.stdout.write_through, sys.stderr.line_buffering, sys.stdout.encoding],
    "flags": list(sys.flags)[:3] + [sys.warnoptions],
    "input": sys.stdin.read(),
}
print(json.dumps([seen, "zygote" in sys.modules]))
"""

# Under `farcall launch --compat` a start imports torch, and then farcall stands in for it.
SEES_COMPAT = """
import sys
import torch, torch.distributed.rpc._testing, torch.distributed.nn
import torch.distributed.optim  # and so Dynamo, as in a zygote
from farcall import compat

torch_modules = {name: one for name, one in list(sys.modules.items()) if name.startswith("torch.")}
of_compat = {
    "installed": compat.is_installed(),
    "site": sys.modules["sitecustomize"].__file__,
    "finders": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "loaders": [type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__],
    "farcall's modules": {
        name: one.__name__ for name, one in torch_modules.items()
        if one.__name__.startswith("farcall")
    },
    "farcall's objects": sorted(
        f"{name}.{attribute} {value.__module__} {getattr(value, '__qualname__', '')}"
        for name, one in torch_modules.items() for attribute, value in vars(one).items()
        if str(getattr(value, "__module__", "")).startswith("farcall")
    ),
}
""" + SEES.replace("seen = {", "seen = {**of_compat,")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(SEES)
    (tmp_path / "module.py").write_text(SEES)
    return tmp_path


def ended(command: tuple[str, ...], *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=PATIENCE, **how
    )


def both_see(*words: str, **how: Any) -> dict[str, Any]:
    """Return what a program sees, the same after a warm start and after a real one."""
    found: list[dict[str, Any]] = []
    for command, is_warm in ((WARM, True), (COLD, False)):
        done = ended(command, *words, **how)
        assert done.returncode == 0, done.stderr
        seen, was_warm = json.loads(done.stdout)
        assert was_warm == is_warm
        found.append(seen)
    warm, cold = found
    assert [(name, warm[name], cold[name]) for name in cold if warm[name] != cold[name]] == []
    return found[0]


def test_a_start_returns_when_others_see_the_process_as_after_a_real_start() -> None:
    """Send it a signal at once: it has its group, and does not ignore what its zygote ignores."""

    def slowly() -> None:
        time.sleep(0.3)  # else the process is mostly faster than this test

    process = subprocess.Popen(
        [*WARM, "-c", "import signal\nwhile True: signal.pause()", "shown"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=slowly,  # noqa: PLW1509
    )
    try:
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert shown[-1] == b"shown"
        assert (os.getsid(process.pid), os.getpgid(process.pid)) == (process.pid, process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "words", [["program.py"], ["./program.py"], ["-m", "module"], ["-c", SEES], ["-u", "-c", SEES]]
)
def test_a_program_finds_the_surroundings_of_a_real_start(words: list[str], folder: Path) -> None:
    seen = both_see(*words, "a", "--flag", cwd=folder, input="read this")
    assert (seen["parent"], seen["input"]) == (os.getpid(), "read this")
    assert seen["argv"][1:] == ["a", "--flag"]


def test_farcall_stands_in_as_after_a_real_start(folder: Path) -> None:
    (folder / "stands_in.py").write_text(SEES_COMPAT)
    seen = both_see("stands_in.py", cwd=folder, env={**os.environ, **_variables_of_compat()})
    assert (seen["installed"], seen["path"][1], seen["site"]) == (
        True,
        BOOT,
        f"{BOOT}/sitecustomize.py",
    )
    assert seen["farcall's modules"]["torch.distributed.rpc"] == "farcall.compat.rpc"
    assert len(seen["farcall's objects"]) > 100


def _variables_of_compat() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (BOOT, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "FARCALL_COMPAT": "1"}


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(number, before)


def test_settings_of_the_start_reach_the_program(folder: Path) -> None:
    read, write = os.pipe()
    program = str(folder / "program.py")
    more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "OF_THIS_TEST": "a\nb="}
    with os.fdopen(read), os.fdopen(write), ignored(signal.SIGINT):
        seen = both_see("-W", "ignore", program, env={**os.environ, **more}, pass_fds=[write])
        assert signal.SIGUSR2 in seen["blocked"]
        assert "SIG_IGN" in seen["handlers"][0]
        assert write in seen["descriptors"]
    threads = ("-c", "import torch; print(torch.get_num_threads())")
    assert ended(WARM, *threads, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout == "1\n"
    assert ended(WARM, *threads, env={**os.environ, "OMP_NUM_THREADS": "7"}).stdout == "7\n"
    assert both_see(program, start_new_session=True)["leads"] == [True, True]
    assert both_see(program, process_group=0)["leads"] == [False, True]


def test_a_folder_for_temporary_files_is_the_programs_own(folder: Path) -> None:
    program = ("-c", "import tempfile; print(tempfile.gettempdir())")
    for name in ("one", "two"):
        (own := folder / name).mkdir()
        done = ended(WARM, *program, env={**os.environ, "TMPDIR": str(own)})
        assert done.stdout.strip() == str(own)
        assert not list(own.iterdir())


HAS = ("-c", "import sys; print('wave' in sys.modules)")  # a module that nothing else imports


@pytest.mark.preloads("wave")
def test_programs_and_their_children_have_the_modules_that_a_test_asks_for() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, *{HAS!r}])"
    assert ended(WARM, *HAS).stdout == "True\n"
    assert ended(WARM, "-c", child).stdout == "True\n"
    assert ended(COLD, *HAS).stdout == "False\n"


def test_programs_of_other_tests_do_not_have_them() -> None:
    assert ended(WARM, *HAS).stdout == "False\n"


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ or "LD_PRELOAD" in os.environ,
    reason="this process is no worker of xdist, or is one that started really",
)
def test_a_worker_of_xdist_is_a_fork_whose_zygote_forks_its_programs() -> None:
    assert Zygote.of_this_process is not None
    forked = "import sys; print('zygote' in sys.modules)"
    assert ended(WARM, "-c", forked).stdout == "True\n"


ENDINGS = {
    "pass": 0,
    "raise SystemExit(3)": 3,
    "raise SystemExit('why')": 1,
    "def f():\n    raise ValueError('no')\nf()": 1,
    "this is no Python": 1,
    "raise SystemExit(-1)": 255,
    "raise SystemExit(True)": 1,
    "import os; os._exit(4)": 4,
    "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')": 120,
    "import logging, sys, wave\nlogging.basicConfig(stream=sys.stdout)  # is not closed in time\n"
    "class A:\n    def __del__(self, out=print): out('last')\nwave.last = A()": 0,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os; os.kill(os.getpid(), 2)": -signal.SIGINT,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import atexit, threading as t\natexit.register(print, 'last')\nprint('first', end='')\n"
    "t.Thread(target=lambda: (t.main_thread().join(), print('a thread'))).start()": 0,
}


# A traceback has the frames of the program, and these depend on how it is run; nothing else does.
WITH_KINDS = [
    program
    for program in ENDINGS
    if program in ("pass", "raise SystemExit(3)", "this is no Python", "raise KeyboardInterrupt")
    or "ValueError" in program
]


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        *((program, "file") for program in ENDINGS),
        *((program, kind) for program in WITH_KINDS for kind in ("code", "module")),
    ],
)
def test_a_program_ends_as_after_a_real_start(program: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(program)
    words = {"file": ["ends.py"], "code": ["-c", program], "module": ["-m", "ends"]}[kind]
    warm, cold = (ended(command, *words, cwd=tmp_path) for command in (WARM, COLD))
    assert (warm.returncode, warm.stdout, warm.stderr) == (
        ENDINGS[program],
        cold.stdout,
        cold.stderr,
    )


TELLS = """
import farcall.ids, farcall.log, os, sys, wave
class Tells:
    def __init__(self, text): self.text = text
    def __del__(self, write=os.write): write(1, self.text.encode())
for module in (sys.modules["__main__"], wave, farcall.log):
    module.tells = Tells(f"{module.__name__} ends, ")
"""


def test_farcall_and_what_a_program_imports_are_destroyed_as_after_a_real_start() -> None:
    told = ended(COLD, "-c", TELLS).stdout
    assert all(name in told for name in ("__main__", "wave", "farcall.log"))
    for more in (
        "",
        "sys.exit(3)",
        "del sys.__interactivehook__",  # by which a warm program hides other modules
        "sys.modules['farcall.ids'] = sys.modules.pop('farcall.ids')",
    ):
        assert ended(WARM, "-c", TELLS + more).stdout == told


def test_a_program_on_farcall_starts_one_on_torch(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text("""
import os, subprocess, sys

show = "import sys; print('zygote' in sys.modules, sys.modules['torch.distributed.rpc'].__name__)"
exec(show)
sys.stdout.flush()
others = {name: value for name, value in os.environ.items() if name != "FARCALL_COMPAT"}
others["PYTHONPATH"] = os.pathsep.join(others["PYTHONPATH"].split(os.pathsep)[1:])
subprocess.run([sys.executable, "-c", show], env={n: v for n, v in others.items() if v})
""")
    done = ended(WARM, str(tmp_path / "starts.py"), env={**os.environ, **_variables_of_compat()})
    assert done.stdout == "True farcall.compat.rpc\nTrue torch.distributed.rpc\n", done.stderr


def test_a_start_that_a_fork_can_not_replace_is_real(tmp_path: Path) -> None:
    is_warm = ("-c", "import sys; print('zygote' in sys.modules)")
    assert ended(WARM, *is_warm).stdout == "True\n"
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "FARCALL_COMPAT"):
        assert ended(WARM, *is_warm, env={**os.environ, name: "/"}).stdout == "False\n"
    assert ended(("env", *WARM), *is_warm).stdout == "False\n"
    assert ended(WARM, *is_warm, umask=0).stdout == "False\n"
    assert ended(WARM, "-X", "dev", *is_warm).stdout == "False\n"
    assert "No such file" in ended(WARM, "nowhere.py").stderr
    with pytest.raises(FileNotFoundError):
        ended(WARM, *is_warm, cwd=tmp_path / "nowhere")


def test_a_variable_that_is_read_late_leaves_starts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")  # as `ray.init` leaves it
    is_warm = ("-c", "import sys; print('zygote' in sys.modules)")
    assert ended(WARM, *is_warm).stdout == "True\n"


def test_variables_that_are_read_early_have_a_zygote_when_they_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look also at the zygote that starts now: it has no other variables of this test."""
    early, late = (tmp_path / name for name in ("early", "late"))
    early.mkdir()
    late.mkdir()
    (early / "only_there.py").touch()
    for name in ("OF_THIS_TEST", "TMPDIR"):
        monkeypatch.setenv(name, str(late))
    path = os.pathsep.join((str(early), os.environ.get("PYTHONPATH", "")))
    has = "('zygote' in sys.modules, 'OF_THIS_TEST' in os.environ)"
    shows = ("-c", f"import os, sys, only_there; print({has})")
    for expected in ("(False, True)\n", "(True, True)\n"):
        assert ended(WARM, *shows, env={**os.environ, "PYTHONPATH": path}).stdout == expected
    task = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    found = []
    for child in task.read_text().split():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended: an earlier program's
            found.append(Path(f"/proc/{child}/environ").read_bytes())
    assert [text for text in found if f"PYTHONPATH={early}".encode() in text]
    assert [text for text in found if str(late).encode() in text] == []
    assert not list(late.iterdir())


STARTS = """
import multiprocessing, os, subprocess, sys
own = "import os, sys; print('zygote' in sys.modules, os.getppid())"

def work(pipe):
    pipe.send(("zygote" in sys.modules, os.getppid()))
    pipe.send(sys.modules["torch.distributed.rpc"].__name__)

if __name__ == "__main__":
    warm, parent = subprocess.check_output([sys.executable, "-c", own], text=True).split()
    print(warm, int(parent) == os.getpid())
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    process.start()
    warm, parent = ours.recv()
    print(warm, parent == os.getpid(), ours.recv())
    process.join()
    print(process.exitcode, flush=True)
    if os.fork() == 0:
        warm = subprocess.check_output([sys.executable, "-c", own], text=True).split()[0]
        print("in a fork", warm, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("rpc", ["torch.distributed.rpc", "farcall.compat.rpc"])
def test_a_child_of_a_warm_program_is_warm_and_its_own(rpc: str, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    is_compat = rpc == "farcall.compat.rpc"
    done = ended(
        WARM,
        str(tmp_path / "starts.py"),
        env={**os.environ, **(_variables_of_compat() if is_compat else {})},
    )
    assert done.stdout == f"True True\nTrue True {rpc}\n0\nin a fork False\n", done.stderr


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_the_zygote_of_a_program_ends_with_it(number: int) -> None:
    code = (
        "import os; pid = os.getpid(); "
        "print(open(f'/proc/{pid}/task/{pid}/children').read(), flush=True); input()"
    )
    with subprocess.Popen(
        [*WARM, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        [child] = program.stdout.readline().split()
        death = os.pidfd_open(int(child))
        try:
            if number:
                program.send_signal(number)
            else:
                program.stdin.write("\n")
                program.stdin.flush()
            assert select.select([death], [], [], PATIENCE)[0]
        finally:
            os.close(death)


def test_the_handlers_and_the_output_of_c_come_at_the_end_of_a_program() -> None:
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.strdup.restype = ctypes.c_void_p\n"
        "kept = ctypes.c_void_p(libc.strdup(b'and a handler'))\n"
        "libc.setvbuf(ctypes.c_void_p.in_dll(libc, 'stdout'), None, 0, 4096)\n"
        "libc.__cxa_atexit(libc.puts, kept, None)\nlibc.printf(b'written, ')\nprint('first')"
    )
    for command in (WARM, COLD):
        written = ended(command, "-c", program).stdout
        assert all(text in written for text in ("first\n", "written, ", "and a handler\n"))
