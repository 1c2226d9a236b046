"""Programs written for torch.distributed.rpc, run unchanged by `farcall launch --compat`.

Where nothing follows but a program in one process, `launch` becomes that program: by `execve`, and
so by a real start, with real starts of the program's processes. Most tests here start the program
themselves, warm, with the two variables that `launch` sets.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import free_port
from patience import PATIENCE
from zygote_jobs import BOOT

PROGRAMS = Path(__file__).parent / "programs"
CLEARED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "FARCALL_SECRET", "FARCALL_LISTEN")
LAUNCH = (
    sys.executable,
    "-c",
    "import sys; from farcall.cli import main; sys.exit(main())",
    "launch",
)

# The output of these programs on farcall; where it names a module, on torch they print torch's.
PRINTED = {
    "references.py": "farcall.compat.rpc [4.0, 4.0] [1, 11] 3.0 ['worker0', 'worker1', 'worker2']",
    "gradients.py": "farcall.compat.rpc True",
    "remote_module.py": "farcall.compat.rpc 2 [(30, 20), (30,)] (128, 30)",
}


def launch(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(*LAUNCH, *arguments, **more)


def variables_of_compat() -> dict[str, str]:
    """Return what `farcall launch --compat` sets for its program."""
    path = os.pathsep.join(filter(None, (BOOT, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "FARCALL_COMPAT": "1"}


def on_farcall(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as `launch --compat` does, but by a warm start."""
    return run(sys.executable, *arguments, **variables_of_compat())


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEARED}
    environment |= {"OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("program", PRINTED)
def test_program_runs_unchanged(program: str, tmp_path: Path) -> None:
    command = (str(PROGRAMS / "unchanged" / program), f"file://{tmp_path}/store")
    is_real = program == "remote_module.py"
    done = launch("--compat", *command) if is_real else on_farcall(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PRINTED[program]


def test_backend_of_a_third_party(tmp_path: Path) -> None:
    done = on_farcall(str(PROGRAMS / "own_backend.py"), f"file://{tmp_path}/store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 {'worker1'} True"


def test_scripted_code_makes_calls(tmp_path: Path) -> None:
    done = on_farcall(str(PROGRAMS / "scripted_calls.py"), f"file://{tmp_path}/store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "documented tensor([2., 2.])",
        "documented, remote tensor([2., 2.])",
        "several tensor([8., 8.]) {'none': []}",
        "method tensor([4., 4.])",
        "hooks tensor([7., 7.]) tensor([6., 6.])",
        "class tensor([2., 2.])",
        "saved tensor(12.)",
        "error RuntimeError True",
        "future tensor([3., 3.])",
        "failing future RuntimeError True RuntimeError True",
        "futures [tensor([2., 2.]), tensor([2., 2.])]",
        "forks tensor(64.)",
        "gradients tensor([7., 7.])",
        "nested tensor([40., 40.])",
    ]


def test_scripted_code_uses_references(tmp_path: Path) -> None:
    done = on_farcall(str(PROGRAMS / "scripted_references.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fetched tensor([4., 4.]) tensor([6., 6.])",
        "about (False, 'w1', True) (True, 'w0', True)",
        "sent tensor([10., 10.])",
        "chained tensor([8., 8.])",
        "made True tensor([2., 2.])",
        "made elsewhere w0 tensor([2., 2.])",
        "picked [[2.0, 2.0], [3.0, 3.0]] tensor([3., 3.])",
        "picked, one 1",
        "by Python tensor([3., 3.])",
        "forks tensor([4., 4.])",
        "interface tensor([3., 3.])",
        "method tensor([7., 7.]) tensor([6., 6.])",
        "saves RuntimeError",
        "owner RuntimeError explained",
        "keeps tensor([6., 6.]) True tensor([2., 2.])",
        "keeps another tensor([4., 4.]) tensor([0., 0.])",
        "keeps it again tensor([6., 6.])",
        "keeps a set RuntimeError explained",
        "remote module tensor([1., 1.])",
        "no reference RuntimeError",
        "too few RuntimeError",
        "value is gone True",
    ]


def test_code_that_was_compiled_before_says_why_it_cannot_call(tmp_path: Path) -> None:
    done = run(sys.executable, str(PROGRAMS / "scripted_before.py"), f"file://{tmp_path}/store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["NotImplementedError explained"] * 3,
        "RuntimeError",
        "tensor([2., 2.])",
    ]


@pytest.mark.parametrize("last", [0, 2])  # the collector, and one of the others
def test_all_gather_ends_when_one_is_late_or_dies(last: int, tmp_path: Path) -> None:
    program = str(PROGRAMS / "gathering.py")
    done = on_farcall(program, f"file://{tmp_path}/store", str(last))
    assert done.returncode == 0, done.stderr
    all_three = [(f"worker{rank}", rank) for rank in range(3)]
    assert done.stdout.splitlines() == [
        *[str([all_three, "RpcTimeout", "PeerLost"])] * 2,
        "[0, 0]",
    ]


def test_without_the_option_torch_is_torch(tmp_path: Path) -> None:
    done = run(
        sys.executable, str(PROGRAMS / "unchanged" / "references.py"), f"file://{tmp_path}/store"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.distributed.rpc [4.0, 4.0] [1, 11] 3.0")


ORIGINALS = {
    "batch_server.py": "updates 5\n",
    "lock_server.py": "pushes 8\n",
    "observers.py": "{1: 15.0, 2: 15.0}\n",
}
IMPORTS = {
    "from farcall import rpc\n": "import torch.distributed.rpc as rpc\n",
    "from farcall.rpc import": "from torch.distributed.rpc import",
}


@pytest.mark.parametrize("program", ORIGINALS)
def test_tutorial_with_its_own_imports(program: str, tmp_path: Path) -> None:
    text = (PROGRAMS / program).read_text()
    for ours, theirs in IMPORTS.items():
        text = text.replace(ours, theirs)
    assert "farcall" not in text
    (tmp_path / program).write_text(text)
    done = on_farcall(str(tmp_path / program), free_port())
    assert done.returncode == 0, done.stderr
    assert done.stdout == ORIGINALS[program]


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.ran = 'ran'\n")
    (tmp_path / "program.py").write_text(
        "import torch.distributed.rpc as rpc\nprint(ran, rpc.__name__)\n"
    )
    done = launch("--compat", str(tmp_path / "program.py"), PYTHONPATH=str(tmp_path))
    assert done.stdout == "ran farcall.compat.rpc\n", done.stderr


def test_modules_and_arguments_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(sys.argv[1:])\n")
    done = launch("--compat", "-m", "shown", "--flag", "x", PYTHONPATH=str(tmp_path))
    assert done.stdout == "['--flag', 'x']\n", done.stderr


def test_one_worker_takes_the_place_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import os; print([os.getppid(), dict(os.environ)])\n")
    show = str(tmp_path / "shown.py")
    plain, done = run(sys.executable, show), launch("--compat", "-n", "1", show)
    parent, environment = ast.literal_eval(plain.stdout)
    assert parent == os.getpid()
    assert ast.literal_eval(done.stdout) == [
        parent,
        environment | variables_of_compat(),
    ], done.stderr


def test_several_workers_on_farcall(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import torch.distributed.rpc as rpc\nprint(rpc.__name__)\n")
    done = launch("--compat", "-n", "2", str(tmp_path / "shown.py"))
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | farcall.compat.rpc",
        "worker1 | farcall.compat.rpc",
    ]


def test_a_program_that_is_not_there() -> None:
    done = launch("--compat", "nowhere.py")
    assert done.returncode == 2
    assert "there is no file 'nowhere.py'" in done.stderr


@pytest.mark.parametrize("ending", ["sys.exit(7)", "raise SystemExit(7)"])
def test_exit_code_is_the_programs(tmp_path: Path, ending: str) -> None:
    (tmp_path / "ends.py").write_text(f"import sys\n{ending}\n")
    assert launch("--compat", str(tmp_path / "ends.py")).returncode == 7
