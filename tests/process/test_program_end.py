"""A program ends with its own exit code, whatever farcall's threads are still doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENCE

PROGRAM = Path(__file__).parent / "programs" / "ends_busy.py"

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


@pytest.mark.parametrize(("ending", "function", "transport"), dict.fromkeys(CASES))
def test_a_program_ends_with_its_own_exit_code(
    ending: str, function: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_WHOLE_END", "1")  # static destructors, too (tests/zygote.py)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), ending, function, transport, f"file://{tmp_path}/meet"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == CODES[ending], done.stderr
    what = "an operation of torch's store" if function == "store" else f"__main__:{function} "
    assert f"the program ends while {what}" in done.stderr
    # The program's output arrives, and its own handlers run.
    assert "not flushed" in done.stdout
    assert "handlers ran" in done.stdout
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr
