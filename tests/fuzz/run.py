"""Fuzz what reads a peer's bytes: each target in a process of its own, for a share of the time.

python tests/fuzz/run.py [--seconds 3600] [--jobs 2] [--native build/fuzz] [TARGET ...]
python tests/fuzz/run.py --replay TARGET FILE

Inputs that reach new code are kept in build/corpus/, and the next run goes on from there. An input
that ends a target's process is written to build/fuzz/, with the command that tries it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from targets import TARGETS

ROOT = Path(__file__).parents[2]
CORPORA = ROOT / "build" / "corpus"
FOUND = ROOT / "build" / "fuzz"
MEMORY = 2048  # MiB that a target may take
SLOW = 20  # seconds that one input may take
MANY = 100_000_000


class Outcome(NamedTuple):
    """The run of a target: inputs, seconds, and the cause of its end (None: the time)."""

    name: str
    inputs: int
    seconds: float
    failure: str | None

    def __str__(self) -> str:
        rate = self.inputs / max(self.seconds, 1e-9)
        text = f"{self.name:12} {self.inputs:>13,} inputs {rate:>8,.0f}/s"
        if self.failure is None:
            return f"{text} {MANY / max(rate, 1e-9) / 3600:7.1f} h for 100 million"
        return f"{text} FAILED\n{self.failure}"


def fuzz_python(name: str, seconds: int) -> Outcome:
    """Run a target of targets.py."""
    from engine import HEAD, LARGEST  # noqa: PLC0415  needs Atheris

    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record"
        record.write_bytes(bytes(HEAD.size + LARGEST))
        engine = str(Path(__file__).with_name("engine.py"))
        seeds = [*TARGETS[name].seeds()]
        options = [f"-rss_limit_mb={MEMORY}", f"-timeout={SLOW}", f"-artifact_prefix={scratch}/"]
        command = [sys.executable, engine, name, str(record), *options]
        done, took = run(command, name, seconds, seeds)
        data = record.read_bytes()
    count, length = HEAD.unpack_from(data)
    if done.returncode == 0:
        return Outcome(name, count, took, None)
    tried = data[HEAD.size : HEAD.size + length]
    FOUND.mkdir(parents=True, exist_ok=True)
    file = FOUND / f"crash-{name}-{digest(tried)}"
    file.write_bytes(tried)
    again = f"{sys.executable} {__file__} --replay {name} {file}"
    return Outcome(name, count, took, f"{end_of(done)}\ntry it again:\n  {again}")


def fuzz_native(program: Path, seconds: int) -> Outcome:
    """Run a target of native/fuzz/, which says itself where its last input is."""
    command = [str(program), "-print_final_stats=1", f"-artifact_prefix={FOUND}/"]
    done, took = run(command, program.name, seconds, [])
    counted = re.search(r"stat::number_of_executed_units: *(\d+)", done.stdout + done.stderr)
    failure = None
    if done.returncode:
        failure = f"{end_of(done)}\ntry it again:\n  {program} {FOUND}/crash-..."
    return Outcome(program.name, int(counted[1]) if counted else 0, took, failure)


def run(
    command: list[str], name: str, seconds: int, seeds: list[bytes]
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a fuzzer over the corpus of that name; return how it ended, and after how long."""
    corpus = CORPORA / name
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds:
        (corpus / f"seed-{digest(data)}").write_bytes(data)
    began = time.monotonic()
    done = subprocess.run(
        [*command, f"-max_total_time={seconds}", str(corpus)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done, time.monotonic() - began


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last words of a process that failed."""
    said = (done.stdout + done.stderr).splitlines()[-40:]
    return "\n".join([*said, f"exit status {done.returncode}"])


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> int:
    """Return the exit status: 1 if a target failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    parser.add_argument("--seconds", type=int, default=3600, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--native", type=Path, help="folder with the targets that are in C++")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="try one input")
    options = parser.parse_args()
    if options.replay:
        name, file = options.replay
        TARGETS[name].run(Path(file).read_bytes())
        return 0
    tasks: dict[str, Callable[[int], Outcome]] = {}
    if importlib.util.find_spec("atheris") is None:
        print("Targets in Python are left out: Atheris is made for Linux on x86-64 only.")
    else:
        tasks |= {name: lambda s, name=name: fuzz_python(name, s) for name in TARGETS}
    for file in sorted(options.native.glob("fuzz_*")) if options.native else ():
        tasks[file.name] = lambda s, file=file: fuzz_native(file, s)
    chosen = options.targets or list(tasks)
    share = max(1, options.seconds * options.jobs // max(1, len(chosen)))
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda name: tasks[name](share), chosen):
            print(outcome, flush=True)
            outcomes.append(outcome)
    print(f"{sum(outcome.inputs for outcome in outcomes):,} inputs in all")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
