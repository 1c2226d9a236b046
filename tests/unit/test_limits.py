"""No limit in the tests is so small that a slow machine exceeds it.

A limit that decides is `PATIENCE`, or a number not below it. A limit that a test wants to pass, an
`RpcTimeout` that it waits for, is below one second: else the test would be slow.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from farcall.runtime.options.backend_options import DEFAULT_RPC_TIMEOUT

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
WANTED = 1.0  # seconds; a limit below it is to pass

LIMITING_KEYWORDS = {"timeout", "rpc_timeout", "deadline", "seconds", "patience"}
# Which positional argument of a method is a limit.
LIMITING_METHODS = {
    **{"wait": 0, "join": 0, "result": 0, "settimeout": 0, "poll": 0, "communicate": 1},
    **{"wait_for": 1, "acquire": 1, "select": 3, "timeout": 0},
}
LIMITING_NAMES = re.compile(r"(^|_)(PATIENCE|SECONDS|LIMIT|GENEROUS|DEADLINE)$")
MEASURED = re.compile(r"(^|_)(seconds|elapsed|took|duration|waited)$")

# Limits that decide nothing: (end of the file's name, a part of the line).
DECIDES_NOTHING = {
    ("test_options.py", "rpc_timeout"): "options that no call is made with",
    ("test_options.py", "timedelta"): "values that are no number of seconds",
    ("test_idle.py", "IDLE_SECONDS"): "how long an idle worker is watched",
    ("test_unreachable_stores.py", "process.wait(7.0)"): "a pause that is to pass",
    ("test_handshake.py", "settimeout(7.0)"): "a number that is to be kept, not waited for",
    ("test_handshake.py", "PARTING_SECONDS"): "far longer than the test",
    ("test_process_groups.py", "rpc_timeout=5"): "one of two workers waits in vain",
    ("test_thread_ceiling.py", "timeout=2.0"): "chains of calls that wait in vain",
    ("test_attack_settings.py", "rpc_timeout=8"): "one of two workers waits in vain",
    ("ends_busy.py", "never"): "a wait that is to be left behind",
    ("test_autograd_programs.py", "Bench(rpc_timeout=5)"): "planted bugs let calls time out",
}


def number(node: ast.AST | None) -> float | None:
    """Return the value of a number, or of plain arithmetic with numbers."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = number(operand)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = number(left), number(right)
            return None if a is None or b is None else a * b
    return None


def is_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("monotonic", "perf_counter", "time")
    )


def limits(tree: ast.AST) -> Iterator[tuple[int, int, float]]:
    """Yield first and last line, and the value, of each number that limits time."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                found = [word.value for word in node.keywords if word.arg in LIMITING_KEYWORDS]
                at = LIMITING_METHODS.get(name)
                if at is not None and isinstance(node.func, ast.Attribute):
                    found += node.args[at : at + 1]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = [value] if LIMITING_NAMES.search(name) else []
            case ast.BinOp(left=left, op=ast.Add(), right=right) if is_clock(left):
                found = [right]
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[right]):
                is_time = isinstance(left, ast.Name) and MEASURED.search(left.id)
                is_time = is_time or (isinstance(left, ast.BinOp) and is_clock(left.left))
                found = [right] if is_time else []
            case _:
                found = []
        values = [number(one) for one in found]
        if calls_wait_as_by_default(node):
            values.append(DEFAULT_RPC_TIMEOUT)
        for value in values:
            if value is not None:
                yield node.lineno, node.end_lineno or node.lineno, value


def calls_wait_as_by_default(node: ast.AST) -> bool:
    """Return whether this starts workers whose calls time out after a minute."""
    match node:
        case ast.Call(func=ast.Name(id="cluster"), keywords=keywords):
            return not {None, "rpc_timeout"} & {word.arg for word in keywords}
    return False


def small_limits(source: str, name: str) -> list[str]:
    lines = source.splitlines()
    found = []
    for line, last, value in limits(ast.parse(source)):
        text = " ".join(part.strip() for part in lines[line - 1 : last])
        is_known = any(name.endswith(file) and part in text for file, part in DECIDES_NOTHING)
        if WANTED <= value < PATIENCE and not is_known:
            found.append(f"{name}:{line}: {text}")
    return found


def files() -> list[Path]:
    # The launcher of PyTorch's own tests is taken as it is, `make field` measures time, and the
    # seconds of the simulators are virtual.
    others = {"conformance", "field", "simulator"}
    return [path for path in sorted(TESTS.rglob("*.py")) if not others & set(path.parts)]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_limit_decides_on_a_slow_machine(path: Path) -> None:
    assert small_limits(path.read_text(), path.name) == [], (
        "these limits fail on a slow machine: wait for an event, with PATIENCE of "
        "tests/patience.py as the limit. A limit that decides nothing has its place in "
        "DECIDES_NOTHING of this file"
    )


def test_limits_of_whole_tests_are_larger_than_the_tests_patience() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    (limit,) = re.findall(r"--timeout=(\d+)", options["addopts"])
    hangs = re.findall(r"faulthandler_timeout=(\d+)", (ROOT / "Makefile").read_text())
    assert PATIENCE < int(limit) < min(map(int, hangs))


@pytest.mark.parametrize(
    "source",
    [
        "done.wait(30)",
        "thread.join(10.0)",
        "subprocess.run(command, timeout=60)",
        "with cluster(2, transport='socket') as (w0, w1): pass",
        "rpc.rpc_sync('w1', f, timeout=5)",
        "SECONDS = 100",
        "PATIENCE = 30.0",
        "deadline = time.monotonic() + 20",
        "assert seconds < 10.0",
        "assert time.monotonic() - start < 2 * 3",
        "select.select([ended], [], [], 10)",
        "@pytest.mark.timeout(120)\ndef test(): pass",
    ],
)
def test_a_small_limit_is_found(source: str) -> None:
    assert len(small_limits(source, "some_file.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "done.wait(PATIENCE)",
        "rpc.rpc_sync('w1', f, timeout=0.05)",
        "rpc.rpc_sync('w1', f, timeout=0)",
        "subprocess.run(command, timeout=600)",
        "with patient_cluster(2, transport='socket') as (w0, w1): pass",
        "with cluster(2, rpc_timeout=600) as (w0, w1): pass",
        "', '.join(names)",
        "future.set_result(7)",
    ],
)
def test_a_number_that_is_no_small_limit_is_not_found(source: str) -> None:
    assert small_limits(source, "some_file.py") == []
