"""Install the wheel into fresh environments, one per Python and torch, and run README's example.

Each environment has no compiler in its PATH. Prints a table for README.md: the seconds of the
example, or why a cell could not be had. `make matrix` runs it; `--short` takes one cell, and with
`--without-cuda` no packages of CUDA are installed (`tests/cuda_stubs.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cuda_stubs import do_without_cuda

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0")
EXPECTED = "tensor([4., 4.])\n[('e', 2)]\n"
INSTALL = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet")


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


def built_wheel(python: str, version: str, folder: Path) -> Path:
    """Build the wheel for one Python, with a compiler, or return the one that was built before."""
    target = folder / "wheels" / version
    if not list(target.glob("*.whl")):
        # Debian's Python has pip in environments only.
        place = folder / f"py{version}-build"
        run(python, "-m", "venv", "--clear", place)
        run(place / "bin/python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", target, ROOT)
        shutil.rmtree(place)
    return next(target.glob("*.whl"))


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
        folder: for wheels and the environment, which is deleted afterwards.
        built: the wheel; built here if None.
        without_cuda: whether stubs take the place of CUDA's packages.

    Returns:
        What the table shows.

    Raises:
        Missing: something can't be had here.
    """
    executable = interpreter(python)
    wheel = built or built_wheel(executable, python, folder)
    place = folder / f"py{python}-torch{torch}"
    shutil.rmtree(place, ignore_errors=True)
    run(executable, "-m", "venv", place)
    try:
        own = place / "bin/python"
        alone = {"PATH": str(place / "bin"), "CXX": "/bin/false"}
        if without_cuda:
            run(own, *INSTALL, "--no-deps", f"torch=={torch}", **alone)
            do_without_cuda(next(place.glob("lib/python*/site-packages")))
        run(own, *INSTALL, f"torch=={torch}", wheel, **alone)
        return timed_example(own, **alone)
    finally:
        shutil.rmtree(place, ignore_errors=True)


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
    for python in pythons:
        cells = []
        for torch in torches:
            try:
                cells.append(
                    try_cell(python, torch, options.folder, options.wheel, options.without_cuda)
                )
                worked += 1
            except Missing as missing:
                cells.append(f"not had: {missing}")
        print(f"| Python {python} | {' | '.join(cells)} |", flush=True)
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
