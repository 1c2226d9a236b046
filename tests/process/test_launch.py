"""`farcall launch` on one machine: output, ends, restarts, and what workers are told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, launch, launching, read_until, written
from patience import PATIENCE

from farcall.processes.supervisor import Rules

CALLS = """
import os
import torch
from farcall import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))
rpc.shutdown()
print("done")
"""


def test_workers_meet_and_call_each_other(tmp_path: Path) -> None:
    done = launch("-n", "3", written(tmp_path, CALLS))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | done",
        "worker0 | tensor([4., 4.])",
        "worker1 | done",
        "worker2 | done",
    ]


# Meets by torch's own rendezvous and by farcall's, and notes its variables.
UNDER_BOTH = """
import json, os, sys
import torch
import torch.distributed as dist
from farcall import rpc

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="env://")
total = torch.tensor(float(rank))
dist.all_reduce(total)
rpc.init_rpc(f"worker{rank}")
seven = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(3, 4))
rpc.shutdown()
dist.destroy_process_group()
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump([dict(os.environ), total.item(), int(seven)], file)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Of the agent of torchrun alone: where its workers write their errors, which signals it handles.
OF_ITS_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OF_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


def test_a_script_runs_under_torchrun_and_under_farcall_launch(tmp_path: Path) -> None:
    program = written(tmp_path, UNDER_BOTH)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    done = launch("-n", "2", program, tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    command = [*TORCHRUN, str(program), str(tmp_path / "theirs")]
    subprocess.run(command, env=environment(), check=True, timeout=PATIENCE)
    for rank in range(2):
        ours, *results = json.loads((tmp_path / "ours" / str(rank)).read_text())
        theirs, *others = json.loads((tmp_path / "theirs" / str(rank)).read_text())
        assert results == others == [1.0, 7]
        set_by_torchrun = theirs.keys() - environment().keys()
        wanted = set_by_torchrun - OF_ITS_OWN
        assert wanted <= ours.keys()
        same = wanted - OF_A_RUN
        assert {n: ours[n] for n in same} == {n: theirs[n] for n in same}


SHOWS = """
import json, os, sys
print(json.dumps({name: os.environ.get(name) for name in sys.argv[1:]}))
"""


def shown(stdout: str) -> dict[str, dict[str, str]]:
    """Return the output of `SHOWS`, by worker."""
    lines = [line.partition(" | ") for line in stdout.splitlines()]
    return {name: json.loads(text) for name, _, text in lines}


def test_roles_take_ranks_in_their_order(tmp_path: Path) -> None:
    names = ("RANK", "FARCALL_ROLE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
    program = written(tmp_path, SHOWS)
    done = launch("--role", "ps:1", "--role", "trainer:2", program, *names)
    assert done.returncode == 0, done.stderr
    assert {name: list(values.values()) for name, values in shown(done.stdout).items()} == {
        "ps0": ["0", "ps", "ps", "0", "1", "3"],
        "trainer0": ["1", "trainer", "trainer", "0", "2", "3"],
        "trainer1": ["2", "trainer", "trainer", "1", "2", "3"],
    }


def test_without_a_role_there_is_none(tmp_path: Path) -> None:
    done = launch(written(tmp_path, SHOWS), "FARCALL_ROLE", "ROLE_NAME")
    assert shown(done.stdout) == {"worker0": {"FARCALL_ROLE": None, "ROLE_NAME": "default"}}


LOOKS_FOR_THE_SECRET = """
import os, pathlib
secret = os.environ["FARCALL_SECRET"].encode()
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert secret not in path.read_bytes()
    except OSError:
        pass
print(secret.decode(), os.environ["FARCALL_LISTEN"])
"""


def test_workers_share_a_secret_that_no_command_line_has(tmp_path: Path) -> None:
    program = written(tmp_path, LOOKS_FOR_THE_SECRET)
    runs = [launch("-n", "2", program) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs
    said = [{line.partition(" | ")[2] for line in run.stdout.splitlines()} for run in runs]
    assert [len(texts) for texts in said] == [1, 1]
    assert said[0] != said[1]
    assert all(text.endswith(" 127.0.0.1") for texts in said for text in texts)


def test_a_secret_that_is_set_is_handed_on(tmp_path: Path) -> None:
    program = written(tmp_path, SHOWS)
    names = ("FARCALL_SECRET", "FARCALL_SECRET_FILE")
    by_value = launch(program, *names, FARCALL_SECRET="given")
    by_file = launch(program, *names, FARCALL_SECRET_FILE="/given")
    assert list(shown(by_value.stdout)["worker0"].values()) == ["given", None]
    assert list(shown(by_file.stdout)["worker0"].values()) == [None, "/given"]


FAILS = """
import os, signal, sys
print("ready", flush=True)
if os.environ["RANK"] == "1":
    {}
signal.pause()
"""


@pytest.mark.parametrize(
    ("fails", "status", "words", "last"),
    [
        ("raise ValueError('wrong')", 1, "exit code 1", "ValueError: wrong"),
        ("print('bad', file=sys.stderr); sys.exit(3)", 3, "exit code 3", "bad"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL: out of memory", "ready"),
        ("os.abort()", 134, "killed by SIGABRT: an abort in compiled code", ""),
    ],
)
def test_one_failure_ends_all_and_is_told_last(
    fails: str, status: int, words: str, last: str, tmp_path: Path
) -> None:
    done = launch("-n", "3", written(tmp_path, FAILS.format(fails)))
    assert done.returncode == status, done.stderr
    told = done.stderr.rpartition("farcall launch: ")[2].splitlines()
    assert told[0].startswith(f"worker1 (rank 1) failed: {words}")
    assert last in told[-1]


IGNORES = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
if os.environ["RANK"] == "1":
    sys.stdin.close()
    open(sys.argv[1]).read()
    sys.exit(5)
while True:
    signal.pause()
"""


def test_a_worker_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    arguments = ("-n", "3", "--grace", "0.1", written(tmp_path, IGNORES), tmp_path / "go")
    with launching(*arguments) as running:
        read_until(running.stdout, "ready", 3)
        (tmp_path / "go").write_text("")
        _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 5
    assert "still there after 0.1 s: worker0, worker2; killed" in told


WAITS = """
import signal, sys
try:
    print("ready", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(1)
"""


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    with launching("-n", "2", written(tmp_path, WAITS)) as running:
        read_until(running.stdout, "ready", 2)
        running.send_signal(signal.SIGINT)
        out, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert sorted(out.splitlines()) == ["worker0 | interrupted", "worker1 | interrupted"]
    assert told == "farcall launch: SIGINT: ending worker0, worker1\n"


def test_the_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    arguments = ("-n", "2", "--grace", "100000", written(tmp_path, IGNORES), tmp_path / "go")
    with launching(*arguments) as running:
        read_until(running.stdout, "ready", 2)
        running.send_signal(signal.SIGINT)
        read_until(running.stderr, "SIGINT: ending worker0, worker1")
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=PATIENCE)
    assert running.returncode == 130


def test_sigterm_ends_all(tmp_path: Path) -> None:
    with launching("-n", "2", written(tmp_path, WAITS)) as running:
        read_until(running.stdout, "ready", 2)
        running.terminate()
        running.communicate(timeout=PATIENCE)
    assert running.returncode == 143


# A worker and its own child hold the fifo open as long as they live.
HOLDS = r"""
import os, signal, sys
os.open(sys.argv[1], os.O_WRONLY)
os.fork()
os.write(1, b"ready\n")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_ends(number: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # A writer of our own, so that opening does not wait.
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    with launching("-n", "2", written(tmp_path, HOLDS), fifo) as running:
        read_until(running.stdout, "ready", 4)
        running.send_signal(number)
        assert os.read(reader, 1) == b""
        # The store has these pipes, too, or would have told us otherwise.
        running.communicate(timeout=PATIENCE)
    os.close(reader)


RESTARTED = """
import os, signal, sys, threading
from farcall import rpc

rank, restarts = int(os.environ["RANK"]), int(os.environ["FARCALL_RESTART_COUNT"])
rpc.init_rpc(f"worker{rank}")
if rank == 1 and restarts < 2:
    os.kill(os.getpid(), signal.SIGKILL)

def asked():
    while True:
        try:
            return rpc.rpc_sync("worker1", os.getenv, args=("FARCALL_RESTART_COUNT",))
        except (rpc.PeerLost, rpc.UnknownWorker):
            threading.Event().wait(0.05)

if rank == 0:
    while asked() != "2":
        pass
    print("met again")
    open(sys.argv[1], "w").close()
else:
    open(sys.argv[1]).close()
rpc.shutdown()
"""


def test_a_worker_that_failed_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    options = ("-n", "2", "--restart", "2", "--restart-delay", "0.02", "--log-dir", tmp_path / "l")
    done = launch(*options, written(tmp_path, RESTARTED), tmp_path / "fifo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "worker0 | met again\n"
    assert "killed by SIGKILL: out of memory?" in done.stderr
    assert "restart 1 of 2 in 0.02 s" in done.stderr
    assert "restart 2 of 2 in 0.04 s" in done.stderr
    assert (tmp_path / "l" / "worker0.log").read_text().endswith("met again\n")
    assert (tmp_path / "l" / "worker1.log").exists()


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    program = written(tmp_path, "raise ValueError('again')")
    done = launch("--restart", "2", "--restart-delay", "0", program)
    assert done.returncode == 1
    assert "worker0 (rank 0) failed, after 2 restarts: exit code 1" in done.stderr
    assert done.stderr.count("worker0 | ValueError: again") == 3
    assert done.stderr.splitlines()[-1] == "ValueError: again"


@pytest.mark.parametrize(
    ("delay", "restarts", "seconds"),
    [(1.0, 3, 8.0), (1.0, 6, 60.0), (0.0, 9, 0.0), (1.0, 2000, 60.0)],
)
def test_delay_doubles_up_to_a_minute(delay: float, restarts: int, seconds: float) -> None:
    assert Rules(restarts=9999, delay=delay, grace=0.0).delay_after(restarts) == seconds


def test_a_module_can_be_the_program(tmp_path: Path) -> None:
    written(tmp_path, "import sys; print(sys.argv[1:])", "shown.py")
    done = launch("-n", "1", "-m", "shown", "--flag", "x", PYTHONPATH=python_path(tmp_path))
    assert done.stdout == "worker0 | ['--flag', 'x']\n", done.stderr


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["-n", "2", "--role", "a:1", __file__], "give -n or --role, not both"),
        (["--role", "a", __file__], "'a' is no name and number, as in trainer:3"),
        (["--role", "a:0", __file__], "'a:0' is no name and number"),
        (["--role", "a:1", "--role", "a:2", __file__], "each role once"),
        (["-n", "0", __file__], "0 is not in the range"),
        (["--hosts", "a,-oProxyCommand=x", "-n", "1", __file__], "is no name of a host"),
        (["--hosts", "a,b", "--role", "x:1", __file__], "2 hosts are too many for 1 workers"),
        (["--log-dir", "/dev/null/x", __file__], "can't create the folder"),
    ],
)
def test_options_of_no_sense_are_refused(arguments: list[str], reason: str) -> None:
    done = launch(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch("--port", str(port), written(tmp_path, CALLS))
    assert done.returncode == 1
    assert f"can't host a store at port {port}: Address already in use" in done.stderr


@pytest.mark.cold
def test_the_launcher_itself_needs_no_torch() -> None:
    program = "import sys, farcall.cli.launch; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
