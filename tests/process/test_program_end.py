"""A program ends with its own exit code, whatever farcall's threads are still doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENCE

PROGRAM = Path(__file__).parent / "programs" / "ends_busy.py"

Done = subprocess.CompletedProcess[str]
DESTROYED = "static objects destroyed"
CODES = {
    "normal": 0,
    "error": 1,
    "exit": 3,
    "text": 1,
    "raise": 5,
    "interrupt": -signal.SIGINT,
    "shutdown, normal": 0,
    "shutdown, exit": 3,
}
FUNCTIONS = (
    *("products", "long_products", "sleeps", "spins", "backward_in_cpp", "backward_in_python"),
    "waits_for_torch",
)
NATIVE = "native" if find_spec("farcall._native") is not None else "socket"
CASES = [
    *((ending, "products", NATIVE) for ending in CODES),
    *((ending, "backward_in_python", NATIVE) for ending in ("normal", "interrupt")),
    *(("exit", function, NATIVE) for function in FUNCTIONS),
    *(("shutdown, exit", function, "socket") for function in ("spins", "backward_in_cpp")),
    *((ending, "store", NATIVE) for ending in ("normal", "error")),
]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Return a function that runs the program with an ending, a function and a transport."""
    monkeypatch.setenv("TESTS_WHOLE_END", "1")  # static destructors, too (tests/zygote.py)

    def run(*words: str) -> Done:
        return subprocess.run(
            [sys.executable, str(PROGRAM), *words, f"file://{tmp_path}/meet"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run


@pytest.mark.parametrize(("ending", "function", "transport"), dict.fromkeys(CASES))
def test_a_program_ends_with_its_own_exit_code(
    ended: Callable[..., Done], ending: str, function: str, transport: str
) -> None:
    done = ended(ending, function, transport)
    assert done.returncode == CODES[ending], done.stderr
    what = "an operation of torch's store" if function == "store" else f"__main__:{function} "
    assert f"the program ends while {what}" in done.stderr
    # The program's output arrives, and its own handlers run.
    assert "not flushed" in done.stdout
    assert "handlers ran" in done.stdout
    assert DESTROYED not in done.stdout  # the function might use them
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr


def test_a_program_without_running_functions_ends_as_python_ends_it(
    ended: Callable[..., Done],
) -> None:
    done = ended("shutdown, exit", "nothing", NATIVE)
    assert done.returncode == 3, done.stderr
    assert "the program ends while" not in done.stderr
    assert DESTROYED in done.stdout
