"""`farcall launch` over several hosts: by ssh, which is a program of ours here, and under srun."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launching import environment, free_port, launch, launching, read_until, written
from patience import PATIENCE

from farcall.cli.launch import plan_for_hosts, plan_for_slurm
from farcall.processes.places import (
    Meeting,
    Role,
    host_names,
    places_in,
    slurm_task,
    spans_over,
)
from farcall.runtime.options.secret import Secret

# Runs the command here, as a shell does at the other end, and notes what it was asked for.
SSH = """#!/bin/sh
echo "$@" >> "$SSH_NOTES"
host="$1"
shift
ON_HOST="$host" exec sh -c "$*"
"""
MEETS = """
import os
from farcall import rpc

rpc.init_rpc(f"worker{os.environ['RANK']}")
names = ("ON_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
if os.environ["RANK"] == "0":
    print([rpc.rpc_sync("worker2", os.getenv, args=(name,)) for name in names])
rpc.shutdown()
"""
# All four say where they are; one on each host meets the other. Workers over ssh start really.
MEETS_BY_TWO = """
import os

rank = int(os.environ["RANK"])
names = ("ON_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
print([os.environ[name] for name in names])
if rank % 2 == 0:
    from farcall import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank // 2, world_size=2)
    if rank == 0:
        print("met", rpc.rpc_sync("worker2", os.getenv, args=("ON_HOST",)))
    rpc.shutdown()
"""


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an `ssh` that stays on this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "SSH_NOTES": str(tmp_path / "notes")}


def test_workers_on_two_hosts_meet(tmp_path: Path, ssh: dict[str, str]) -> None:
    secret = Secret.generate().reveal().decode()
    program = written(tmp_path, MEETS_BY_TWO)
    hosts = ("--hosts", "user@localhost,127.0.0.1", "-n", "2")
    done = launch(*hosts, program, FARCALL_SECRET=secret, **ssh)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | ['user@localhost', '0', '2', '0', '4']",
        "worker0 | met 127.0.0.1",
        "worker1 | ['user@localhost', '1', '2', '0', '4']",
        "worker2 | ['127.0.0.1', '0', '2', '1', '4']",
        "worker3 | ['127.0.0.1', '1', '2', '1', '4']",
    ]
    notes = (tmp_path / "notes").read_text()
    assert len(notes.splitlines()) == 5  # four workers, and the store on the first host
    assert secret not in notes


@pytest.mark.parametrize(
    ("fails", "status", "words"),
    [
        ("raise ValueError('wrong')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV: a crash"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL: out of memory?\n"),
        ("os._exit(255)", 255, "exit code 255 (could ssh not connect?)"),
    ],
)
def test_a_failure_elsewhere_is_told_with_its_host(
    fails: str, status: int, words: str, tmp_path: Path, ssh: dict[str, str]
) -> None:
    program = written(
        tmp_path,
        f"import os, signal\nif os.environ['RANK'] == '1':\n    {fails}\nsignal.pause()\n",
    )
    done = launch("--hosts", "localhost,b", program, **ssh)
    assert done.returncode == status, done.stderr
    told = done.stderr.rpartition("farcall launch: ")[2]
    assert told.startswith(f"worker1 (rank 1 on b) failed: {words}")


def test_a_host_that_ssh_does_not_reach(tmp_path: Path, ssh: dict[str, str]) -> None:
    Path(ssh["PATH"].partition(os.pathsep)[0], "ssh").write_text(
        "#!/bin/sh\necho unreachable >&2\nexit 255\n"
    )
    done = launch("--hosts", "localhost", written(tmp_path, MEETS), **ssh)
    assert done.returncode == 1
    assert "unreachable" in done.stderr
    assert "no store could be started on localhost" in done.stderr


HOLDS = r"""
import os, signal, sys
os.open(sys.argv[1], os.O_WRONLY)
os.fork()
os.write(1, b"ready\n")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_on_the_hosts(
    number: signal.Signals, tmp_path: Path, ssh: dict[str, str]
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    with launching("--hosts", "localhost,b", written(tmp_path, HOLDS), fifo, **ssh) as running:
        read_until(running.stdout, "ready", 4)
        running.send_signal(number)
        assert os.read(reader, 1) == b""
        running.communicate(timeout=PATIENCE)
    os.close(reader)


def slurm(rank: int, size: int, **more: str) -> dict[str, str]:
    """Return srun's variables on two hosts; the first has one more task if need be."""
    first = (size + 1) // 2
    node = int(rank >= first)
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - node * first),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_STEP_TASKS_PER_NODE": f"{first}(x2)" if size % 2 == 0 else f"{first},{size - first}",
        **more,
    }


def test_tasks_of_srun_meet_at_the_first_node(tmp_path: Path) -> None:
    program = written(tmp_path, MEETS.replace("ON_HOST", "SLURM_PROCID"))
    port = free_port()
    secret = Secret.generate().reveal().decode()
    second = environment(FARCALL_SECRET=secret, **slurm(1, 2))
    with launching("-n", "2", "--port", port, program, **second) as other:
        first = slurm(0, 2)
        done = launch("-n", "2", "--port", port, program, FARCALL_SECRET=secret, **first)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "worker0 | ['1', '0', '2', '1', '2']\n"
        _, told = other.communicate(timeout=PATIENCE)
    assert other.returncode == 0, told


def test_srun_without_a_secret_is_refused() -> None:
    done = launch(__file__, **slurm(0, 2))
    assert done.returncode == 2
    assert "export FARCALL_SECRET=$(farcall secret)" in done.stderr


def test_srun_that_says_too_little_is_refused() -> None:
    done = launch(__file__, SLURM_PROCID="0", SLURM_NTASKS="2")
    assert done.returncode == 2
    assert "SLURM_PROCID is set, so this should be a task of srun, but no " in done.stderr


def test_places_of_a_task_of_srun() -> None:
    task = slurm_task(slurm(2, 3))
    assert task is not None
    plan = plan_for_slurm(task, 2, (), None, None)
    assert plan.meeting == Meeting("localhost", 24242)
    assert not plan.hosts_store
    assert [(p.rank, p.local_rank, p.local_world_size) for p in plan.places] == [
        (4, 0, 2),
        (5, 1, 2),
    ]
    with_roles = plan_for_slurm(task, 1, [Role("ps", 1), Role("trainer", 2)], "ib0", 7)
    assert [place.name for place in with_roles.places] == ["trainer1"]
    assert with_roles.meeting == Meeting("ib0", 7)


def test_variables_of_the_job_will_do() -> None:
    of_job = {
        "SLURM_JOBID": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "gpu[01-02]",
    }
    task = slurm_task(of_job)
    assert task is not None
    assert (task.rank, task.local_rank, task.local_size, task.first_host) == (3, 1, 2, "gpu01")


def test_a_batch_script_is_no_task() -> None:
    assert slurm_task({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH"}) is None
    assert slurm_task({"SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b-1.example", ["a", "b-1.example"]),
        ("gpu[08-10,2],login", ["gpu08", "gpu09", "gpu10", "gpu2", "login"]),
        ("r[1-2]n[1-2]-x", ["r1n1-x", "r1n2-x", "r2n1-x", "r2n2-x"]),
    ],
)
def test_hosts_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert host_names(text) == names


@pytest.mark.parametrize("text", ["", "a[b]", "a[1-]"])
def test_a_text_that_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="no list of hosts"):
        host_names(text)


def test_ranks_are_divided_over_hosts() -> None:
    spans = spans_over(3, 7)
    assert [(span.begin, span.size, span.group_rank) for span in spans] == [
        (0, 3, 0),
        (3, 2, 1),
        (5, 2, 2),
    ]
    places = places_in(spans[1], [Role("ps", 4), Role("trainer", 3)], 7, 3)
    assert [(p.rank, p.local_rank, p.name) for p in places] == [(3, 0, "ps3"), (4, 1, "trainer0")]


def test_roles_over_hosts() -> None:
    plan = plan_for_hosts(["u@a", "b"], 1, [Role("ps", 1), Role("trainer", 2)], None, 0)
    assert plan.meeting == Meeting("a", 0)
    assert list(zip(plan.hosts, (p.name for p in plan.places), strict=True)) == [
        ("u@a", "ps0"),
        ("u@a", "trainer0"),
        ("b", "trainer1"),
    ]
