"""PyTorch's own RPC tests on farcall: a part of those that `make conformance` runs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
SHARE = 8  # one test of so many, and at least one of each class
SECONDS = 900
# They end a gloo group right after `with model.join()`, which can block torch (docs/threads.md):
# with torch's own RPC, too, once in 20 to 100 runs.
CAN_BLOCK = {
    "DdpComparisonTest.test_ddp_comparison",
    "DdpComparisonTest.test_ddp_comparison_uneven_inputs",
}
# It gives four ranks half a second to meet, which a busy machine doesn't keep.
HURRIED = {"RpcTest.test_set_and_get_default_rpc_timeout"}


def part_of(tests: list[str]) -> list[str]:
    """Return the tests whose hash says so, and of each class the one with the smallest."""
    numbers = {test: int(hashlib.sha256(test.encode()).hexdigest(), 16) for test in tests}
    first: dict[str, str] = {}
    for test in sorted(tests, key=numbers.__getitem__):
        first.setdefault(test.partition(".")[0], test)
    return [test for test in tests if numbers[test] % SHARE == 0 or test in first.values()]


@pytest.mark.timeout(SECONDS)
def test_part_of_core_and_scripted(tmp_path: Path) -> None:
    lists = [(CONFORMANCE / "lists" / f"{name}.txt").read_text() for name in ("core", "scripted")]
    lines = [line for text in lists for line in text.splitlines()]
    tests = [line.split()[0] for line in lines]
    chosen = part_of([test for test in tests if test not in CAN_BLOCK | HURRIED])
    (tmp_path / "chosen.txt").write_text("\n".join(chosen))
    command = [
        *(sys.executable, str(CONFORMANCE / "run_conformance.py")),
        *("--impl", "farcall", "--impl-path", str(ROOT / "src")),
        *("--list", str(tmp_path / "chosen.txt"), "--start", "fork", "-j", "2", "--strict"),
        *("--json", str(tmp_path / "results.json"), "--logs", str(tmp_path / "logs")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    failed = {r["id"]: r.get("error") or r["status"] for r in results if r["status"] != "pass"}
    assert not failed
    assert len(results) == len(chosen)
    assert done.returncode == 0, done.stdout
