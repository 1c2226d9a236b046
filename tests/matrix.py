"""Install the wheel into fresh environments, one per Python and torch, and run README's example.

Each environment has no compiler in its PATH. Prints a table for README.md: the seconds of the
example, or why a cell could not be had. `make matrix` runs it; `--short` takes one cell, and with
`--without-cuda` no packages of CUDA are installed (`tests/cuda_stubs.py`).

pip builds the wheel in an isolated environment, after `make native` with the object files of that
where they are the same (`tests/reused_objects.py`), and with its nanobind if pip would install that
version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from functools import cache
from pathlib import Path

from cuda_stubs import do_without_cuda
from reused_objects import cached, with_objects

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0")
EXPECTED = "tensor([4., 4.])\n[('e', 2)]\n"
QUIET = ("--disable-pip-version-check", "--quiet")


class Missing(Exception):
    """A cell that can't be had here; the message says why."""


def readme_example() -> str:
    """Return the first program of README.md."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def interpreter(version: str) -> str:
    """Return the path of this version of Python.

    Raises:
        Missing: it is not installed.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"))
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = str(installed[-1]) if installed else shutil.which(f"python{version}")
    if version == running:
        path = getattr(sys, "_base_executable", sys.executable)
    if path is None:
        raise Missing(f"no Python {version}")
    return path


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return what it prints.

    Raises:
        Missing: it failed; the message is its last line.
    """
    surroundings = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYENV_VERSION")}
    done = subprocess.run(
        [str(part) for part in command],
        env=surroundings | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it failed"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise Missing((errors or said)[-1])
    return done.stdout


@cache
def pip_of(python: str, folder: Path) -> tuple[str, ...]:
    """Return the command of pip in an environment of its own, since Debian's Python has none.

    It installs into all environments of this Python: pip is dear to install in each.
    """
    place = Path(tempfile.mkdtemp(prefix="pip-", dir=folder))
    run(python, "-m", "venv", place)
    return (str(place / "bin/python"), "-m", "pip", *QUIET)


@cache
def built_wheel(python: str, folder: Path) -> Path:
    """Build the wheel for one Python, with a compiler."""
    target = Path(tempfile.mkdtemp(prefix="wheel-", dir=folder))
    pip = pip_of(python, folder)
    wheel = (*pip, "wheel", "--no-deps", "-w", target, ROOT)
    nanobind = cached("NB_DIR")
    if nanobind and would_install(pip, nanobind):
        # Another CMake may order flags otherwise, and ninja would compile everything again.
        tools = [Path(cached(name)).parent for name in ("CMAKE_COMMAND", "CMAKE_MAKE_PROGRAM")]
        path = os.pathsep.join([*map(str, tools), os.environ["PATH"]])
        define = f"-Ccmake.define.nanobind_DIR={nanobind}/cmake"
        run(*wheel, with_objects(target / "build"), define, PATH=path)
    else:
        run(*wheel)
    return next(target.glob("*.whl"))


def would_install(pip: tuple[str, ...], nanobind: str) -> bool:
    """Return whether pip would install this nanobind's version for an isolated build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    plan = ("install", "--dry-run", "--ignore-installed", "--report", "-")
    report = json.loads(run(*pip, *plan, *project["build-system"]["requires"]))
    versions = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    return Path(nanobind).with_name(f"nanobind-{versions.get('nanobind')}.dist-info").exists()


def timed_example(python: Path, **environment: str) -> str:
    """Run the example with the packages of `python`, and return the seconds it took.

    Raises:
        Missing: it failed, or printed something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "example.py")
        script.write_text(readme_example())
        began = time.monotonic()
        printed = run(python, script, **environment)
        seconds = time.monotonic() - began
    if printed != EXPECTED:
        raise Missing(f"the example printed {printed!r}")
    return f"{seconds:.1f} s"


def try_cell(
    python: str, torch: str, folder: Path, built: Path | None = None, without_cuda: bool = False
) -> str:
    """Install into a fresh environment without a compiler and run the example.

    Args:
        python: version, such as 3.12.
        torch: version, such as 2.13.0.
        folder: for wheels, pip and the environment, which is deleted afterwards.
        built: the wheel; built here if None.
        without_cuda: whether stubs take the place of CUDA's packages.

    Returns:
        The texts that the table shows.

    Raises:
        Missing: something can't be had here.
    """
    executable = interpreter(python)
    wheel = built or built_wheel(executable, folder)
    place = folder / f"py{python}-torch{torch}"
    run(executable, "-m", "venv", "--without-pip", place)
    try:
        own = place / "bin/python"
        alone = {"PATH": str(place / "bin"), "CXX": "/bin/false"}
        # The first example compiles what it imports, and pip would compile all that it installs.
        install = (*pip_of(executable, folder), "--python", own, "install", "--no-compile")
        written = {"PYTHONDONTWRITEBYTECODE": ""}
        if without_cuda:
            run(*install, "--no-deps", f"torch=={torch}", **alone)
            do_without_cuda(next(place.glob("lib/python*/site-packages")))
        run(*install, f"torch=={torch}", wheel, **alone)
        timed_example(own, **alone, **written)
        return timed_example(own, **alone)
    finally:
        shutil.rmtree(place)


def main() -> int:
    """Run the cells that are asked for; 0 if at least one of them worked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", default=",".join(PYTHONS))
    parser.add_argument("--torches", default=",".join(TORCHES))
    parser.add_argument("--short", action="store_true", help="this Python, the torch of CI")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there, for one Python")
    parser.add_argument("--here", action="store_true", help="run the example in this environment")
    parser.add_argument("--without-cuda", action="store_true", help="stubs, not CUDA's packages")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/matrix")
    options = parser.parse_args()
    pythons, torches = options.pythons.split(","), options.torches.split(",")
    if options.short:
        pythons = [f"{sys.version_info.major}.{sys.version_info.minor}"]
        torches = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if options.here:
        print(timed_example(Path(sys.executable)))
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    worked = 0
    print(f"| | torch {' | torch '.join(torches)} |\n|{'---|' * (len(torches) + 1)}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for python in pythons:
            cells = []
            for torch in torches:
                try:
                    cells.append(
                        try_cell(python, torch, Path(name), options.wheel, options.without_cuda)
                    )
                    worked += 1
                except Missing as missing:
                    cells.append(f"not had: {missing}")
            print(f"| Python {python} | {' | '.join(cells)} |", flush=True)
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
