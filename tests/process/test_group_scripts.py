"""Programs that start workers with `farcall.local`: their output, and that nothing is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest
from patience import PATIENCE

GUARD = 'if __name__ == "__main__":'

# Prints the process ids of its workers, of what each of them has started, and of their fork server,
# then waits inside of the block.
WAITING = f"""
import os
import subprocess
import sys
import threading

import farcall


def family():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    return os.getpid(), os.getppid(), child.pid


def wait():
    threading.Event().wait()


{GUARD}
    with farcall.local(2) as group:
        families = group.all.call(family)
        print(*sorted({{number for one in families for number in one}}), flush=True)
        group[0].call(wait)
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which may leave files in the folder."""
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextmanager
def deaths_of(numbers: list[int]) -> Iterator[list[int]]:
    """Give descriptors that become readable when these processes end."""
    with ExitStack() as stack:
        descriptors = []
        for number in numbers:
            descriptors.append(os.pidfd_open(number))
            stack.callback(os.close, descriptors[-1])
        yield descriptors


@contextmanager
def waiting(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Give a program that waits in its block, and descriptors of all that it has started."""
    script = folder / "script.py"
    script.write_text(WAITING, encoding="utf-8")
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with driver:
        try:
            assert driver.stdout is not None
            numbers = [int(number) for number in driver.stdout.readline().split()]
            assert len(numbers) == 5
            with deaths_of(numbers) as deaths:
                yield driver, deaths
        finally:
            driver.kill()


def wait_for_all(deaths: list[int]) -> None:
    for death in deaths:
        assert select.select([death], [], [], PATIENCE)[0]


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_driver_is_killed(number: int, tmp_path: Path) -> None:
    with waiting(tmp_path) as (driver, deaths):
        driver.send_signal(number)
        wait_for_all(deaths)
        assert files_in(tmp_path) == ["script.py"]


def test_nothing_is_left_when_the_driver_is_killed_whose_fork_lives_on(tmp_path: Path) -> None:
    """Keep the driver's end of all connections in its fork, so that they don't end."""
    done = run(
        tmp_path,
        f"""
        import os
        import select
        import signal
        import farcall

        def family():
            return os.getpid(), os.getppid()

        {GUARD}
            group = farcall.local(2)
            numbers = {{number for pair in group.all.call(family) for number in pair}}
            deaths = [os.pidfd_open(number) for number in numbers]
            driver = os.getpid()
            if os.fork() == 0:
                os.kill(driver, signal.SIGKILL)
                for death in deaths:
                    select.select([death], [], [])
                print("all have ended", flush=True)
                os._exit(0)
            signal.pause()
        """,
    )
    assert done.stdout == "all have ended\n", done.stderr
    assert done.returncode == -signal.SIGKILL
    assert files_in(tmp_path) == ["script.py"]


def test_nothing_is_left_when_the_driver_is_killed_while_it_starts_workers(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import os
        import signal
        import farcall
        from farcall.groups.crew import Crew

        def die(crew):
            print(crew._server.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        {GUARD}
            Crew.start = die
            farcall.local(2)
        """,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with suppress(ProcessLookupError), deaths_of([int(done.stdout)]) as deaths:
        wait_for_all(deaths)
    assert files_in(tmp_path) == ["script.py"]


def test_ctrl_c_ends_the_block(tmp_path: Path) -> None:
    with waiting(tmp_path) as (driver, deaths):
        driver.send_signal(signal.SIGINT)
        wait_for_all(deaths)
        assert driver.wait(PATIENCE) in (-signal.SIGINT, 128 + signal.SIGINT)
    assert files_in(tmp_path) == ["script.py"]


def test_the_output_of_a_function_is_shown_before_its_call_returns(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import sys
        import farcall

        def greet(name):
            print("hello", name)
            print("to stderr", file=sys.stderr)
            return name

        {GUARD}
            with farcall.local(2) as group:
                print("result", group[1].call(greet, "you"), flush=True)
                print(group.map(greet, ["a"]), flush=True)
                group.all.call(greet, "all")
                print("end")
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == ["worker1 | hello you", "result you", "worker0 | hello a", "['a']"]
    assert sorted(lines[4:6]) == ["worker0 | hello all", "worker1 | hello all"]
    assert lines[6:] == ["end"]
    assert done.stderr.splitlines().count("worker1 | to stderr") == 2


def test_a_program_that_ends_closes_its_group(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import atexit
        import farcall

        class Greeter:
            def greet(self):
                atexit.register(print, "the worker ends")
                return self

        {GUARD}
            group = farcall.local(1)
            reference = group[0].remote(Greeter)
            print(type(reference.rpc_sync().greet()) is Greeter)
            raise SystemExit(3)
        """,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["True", "worker0 | the worker ends"]


def test_a_block_that_fails_ends_at_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import threading
        import farcall

        def wait():
            threading.Event().wait()

        {GUARD}
            with farcall.local(1) as group:
                group[0].call_async(wait)
                raise SystemExit(4)
        """,
    )
    assert done.returncode == 4, done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run(tmp_path, "import farcall\nfarcall.local(2)")
    assert done.returncode == 1
    assert "'worker0' could not start: farcall.local() was called while a worker" in done.stderr
    assert f"\n    {GUARD}\n" in done.stderr


@pytest.mark.parametrize(
    ("what", "reason"),
    [("raise ValueError('no data')", "ValueError: no data"), ("os._exit(7)", "exit code 7")],
)
def test_a_worker_that_can_not_start_says_why(what: str, reason: str, tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import os
        import farcall

        {GUARD}
            farcall.local(2)
        else:
            {what}
        """,
    )
    assert done.returncode == 1
    assert "RuntimeError: 'worker0' could not start" in done.stderr
    assert reason in done.stderr


def test_a_worker_that_is_killed_while_it_joins_ends_the_start(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import os
        import farcall
        from farcall import rpc

        if __name__ != "__main__":
            rpc.start_default_agent = lambda *more: os._exit(9)

        {GUARD}
            farcall.local(2)
        """,
    )
    assert done.returncode == 1
    assert "could not start: its process ended: exit code 9" in done.stderr


def test_the_end_of_the_process_that_starts_workers_is_told_in_words(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import farcall
        from farcall.groups.crew import Crew

        wait = Crew._wait_until_warm

        def wait_and_end_it(crew):
            wait(crew)
            crew._server.kill()
            crew._server.wait()

        {GUARD}
            Crew._wait_until_warm = wait_and_end_it
            farcall.local(2)
        """,
    )
    assert done.returncode == 1
    assert "'worker0' could not start: its process ended: killed by SIGKILL" in done.stderr
    assert "of the process that starts the workers" in done.stderr
    assert files_in(tmp_path) == ["script.py"]


def test_a_start_without_enough_descriptors_says_so_and_leaves_none_open(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import gc
        import os
        import resource
        import threading
        import farcall

        def opened():
            gc.collect()
            return len(os.listdir("/proc/self/fd")) - 1

        {GUARD}
            before, threads = opened(), threading.active_count()
            _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            said = []
            for room in range(20):
                resource.setrlimit(resource.RLIMIT_NOFILE, (before + room, most))
                try:
                    farcall.local(2)
                except OSError as error:
                    said.append("ulimit -n" in "".join(getattr(error, "__notes__", ())))
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert opened() == before, room
                assert threading.active_count() == threads, room
            print(len(said), any(said))
            with farcall.local(1) as group:
                print(group[0].call(abs, -1))
        """,
    )
    assert done.stdout.splitlines() == ["20 True", "1"], done.stderr
    assert files_in(tmp_path) == ["script.py"]


def test_groups_follow_each_other_and_leave_the_process_as_it_was(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        import multiprocessing
        import os
        import threading
        import farcall
        from farcall import rpc

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        {GUARD}
            os.environ["FARCALL_SECRET"] = "no secret of this group's"
            farcall.local(1, processes=False).close()
            with farcall.local(1):
                pass
            before = descriptors()
            for _ in range(2):
                with farcall.local(1) as group:
                    assert group[0].call(abs, -1) == 1
            print(descriptors() - before)
            print(multiprocessing.get_start_method(allow_none=True))
            print([t.name for t in threading.enumerate() if "farcall" in t.name])
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "None", "[]"]
