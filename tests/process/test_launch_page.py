"""The commands of the pages about starting workers run, or are at least understood."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, free_port, launch, written
from patience import PATIENCE

from farcall.cli.launch import launch as command
from farcall.processes.places import Meeting, Role, places_in, spans_over, variables
from farcall.runtime.options.secret import Secret

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("launch", "slurm", "kubernetes", "docker", "torchrun")
PAGES = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)


def block(name: str) -> str:
    """Return the fenced block behind the comment of that name."""
    match = re.search(rf"<!-- {re.escape(name)} -->\n\n```\w+\n(.*?)```", PAGES, re.DOTALL)
    assert match is not None, name
    return match[1]


def test_the_first_example_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    shown, *printed = block("one machine").splitlines()
    program = written(tmp_path, block("train.py"), "train.py")
    *options, name = shlex.split(shown.removeprefix("$ farcall launch "))
    assert name == program.name
    done = launch(*options, program)
    assert sorted(done.stdout.splitlines()) == sorted(printed), done.stderr


def test_the_example_for_roles_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    shown, *printed = block("roles").splitlines()
    program = written(tmp_path, block("roles.py"), "roles.py")
    *options, name = shlex.split(shown.removeprefix("$ farcall launch "))
    assert name == program.name
    done = launch(*options, program)
    assert done.stdout.splitlines() == printed, done.stderr


def test_the_example_for_restarts(tmp_path: Path) -> None:
    program = written(tmp_path, block("elastic.py"), "elastic.py")
    done = launch("-n", "3", "--restart", "1", "--restart-delay", "0.1", program)
    assert done.stdout == "worker0 | [('worker1', 1), ('worker2', 4)]\n", done.stderr
    assert "worker1 (rank 1): killed by SIGABRT" in done.stderr
    assert done.returncode == 0


def test_the_pods_of_the_page_meet(tmp_path: Path) -> None:
    text = block("kubernetes")
    values = dict(re.findall(r'- name: (\w+)\n +value: "?([^"\n]+)"?', text))
    size = int(values["WORLD_SIZE"])
    assert re.search(rf"completions: {size}\n *parallelism: {size}\n", text)
    # The names of pods and the port are the cluster's.
    values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    values["FARCALL_SECRET"] = Secret.generate().reveal().decode()
    program = written(tmp_path, block("train.py"), "train.py")
    pods = [
        subprocess.Popen(
            [sys.executable, program],
            env=environment(RANK=str(index), **values),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(size)
    ]
    assert [pod.communicate(timeout=PATIENCE)[0] for pod in pods] == [
        "[tensor([2., 2.])]\ndone\n",
        "done\n",
    ]


RETURNING_POD = """
import os, threading
from farcall import rpc

rpc.init_rpc("worker" + os.environ["RANK"])
if os.environ["RANK"] == "1":
    threading.Event().wait()
gone = threading.Event()
rpc.on_leave(lambda event: gone.set())
rpc.wait_for("worker1")
try:
    rpc.rpc_sync("worker1", os._exit, (3,))
except rpc.PeerLost:
    gone.wait()
    print("lost", flush=True)
rpc.wait_for("worker1")
print(rpc.rpc_sync("worker1", int, ("4",)), flush=True)
os._exit(0)
"""


def test_a_pod_that_is_made_again_gets_into_the_group_of_the_page(tmp_path: Path) -> None:
    program = written(tmp_path, RETURNING_POD, "program.py")
    pods = environment(
        WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=free_port(),
        FARCALL_SECRET=Secret.generate().reveal().decode(),
        FARCALL_ELASTIC="1",
    )

    def start(rank: int) -> subprocess.Popen[str]:
        variables = {**pods, "RANK": str(rank)}
        return subprocess.Popen(
            [sys.executable, program], env=variables, stdout=subprocess.PIPE, text=True
        )

    first, second = start(0), start(1)
    assert second.wait(PATIENCE) == 3
    again = start(1)
    try:
        assert first.communicate(timeout=PATIENCE)[0] == "lost\n4\n"
    finally:
        for pod in (first, second, again):
            pod.kill()
            pod.communicate()


COMMANDS = re.findall(r"farcall launch (-.*? (?:train|roles)\.py)", PAGES)


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_commands_of_the_pages_are_understood(line: str) -> None:
    context = command.make_context("launch", shlex.split(line))
    assert context.params["program"] in ("train.py", "roles.py")


def test_every_variable_is_on_a_page() -> None:
    place = places_in(spans_over(1, 1)[0], [Role("ps", 1)], 1, 1)[0]
    table = PAGES.partition("## What workers find")[2]
    missing = [
        name for name in variables(place, Meeting("a", 1), "", 0) if f"`{name}`" not in table
    ]
    assert missing == []


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 5


CLONE_NEWNS = 0x20000  # of <linux/sched.h>: mounts of this process and its children alone
SMALL_SHM = """
import farcall, os, torch

def total(tensor):
    return tensor.sum().item()

if __name__ == "__main__":
    print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
    with farcall.local(2) as group:
        print(group[0].call(total, torch.ones(30_000_000)))
        print(group[1].call(torch.ones, 30_000_000).sum().item())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    program = written(tmp_path, SMALL_SHM, "program.py")

    def mount() -> None:  # by value to the zygote, which does not have this module
        if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
            os.system("mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm")

    done = subprocess.run(
        [sys.executable, str(program)],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
        preexec_fn=mount,
    )
    assert done.stdout.split() == [str(1 << 20), "30000000.0", "30000000.0"], done.stderr
