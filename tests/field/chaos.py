"""Six workers that call each other while one of them is killed or stopped every second."""

from __future__ import annotations

import contextlib
import json
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from report import Report, Settings

NAMES = [f"w{index}" for index in range(6)]
CALM = 3.0  # seconds, at the start and before the end
TIMEOUT = 3.0  # of each call, as in chaos_worker
ALLOWED = 1.0  # seconds after the deadline by which there is an outcome
SLACK = 2  # of threads, descriptors and segments, in comparison with the calm at the start


class Worker:
    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.name = name
        self.stops: list[tuple[float, float]] = []
        self.is_stopped_until: float | None = None
        self._stopped_at = 0.0
        self._log = (folder / f"{name}.{number}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "chaos_worker.py", name, folder, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(OSError):
                file.close()

    def stop(self, until: float) -> None:
        self._stopped_at = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        self.is_stopped_until = until

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stops.append((self._stopped_at, time.monotonic()))
        self.is_stopped_until = None

    def stood(self, began: float, ended: float) -> float:
        """For how many of these seconds the process was stopped."""
        return sum(max(0.0, min(end, ended) - max(start, began)) for start, end in self.stops)

    def command(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def answer(self, patience: float = 90.0) -> dict[str, Any] | None:
        """None: it has ended, or says nothing."""
        if not select.select([self.process.stdout], [], [], patience)[0]:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def ask(workers: list[Worker], command: str) -> list[dict[str, Any] | None]:
    for worker in workers:
        worker.command(command)
    return [worker.answer() for worker in workers]


class Chaos:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self.started: list[Worker] = []
        self.living: dict[str, Worker] = {}
        self.kills = self.stops = 0
        for name in NAMES:
            self._start(name)

    def _start(self, name: str) -> None:
        worker = Worker(name, self._settings.folder, len(self.started))
        self.started.append(worker)
        self.living[name] = worker

    def wreak(self) -> None:
        end = time.monotonic() + self._settings.seconds
        while time.monotonic() < end:
            time.sleep(1.0)
            self._resume(time.monotonic())
            running = [w for w in self.living.values() if w.is_stopped_until is None]
            if not running:
                continue
            victim = self._random.choice(running)
            if self._random.random() < 0.4:
                victim.kill()
                self._start(victim.name)
                self.kills += 1
            else:
                victim.stop(time.monotonic() + self._random.uniform(0.3, 8.0))
                self.stops += 1
        self._resume(float("inf"))

    def _resume(self, now: float) -> None:
        for worker in self.living.values():
            if worker.is_stopped_until is not None and worker.is_stopped_until <= now:
                worker.resume()

    def late(self) -> list[str]:
        """Calls that ended too late, in the time that their process was running."""
        by_pid = {worker.process.pid: worker for worker in self.started}
        file = self._settings.folder / "late"
        found = []
        for line in file.read_text().splitlines() if file.exists() else []:
            name, pid, kind, began, ended = json.loads(line)
            stood = by_pid[pid].stood(began, ended)
            if ended - began - stood > TIMEOUT + ALLOWED:
                found.append(f"{name} {kind}: {ended - began:.2f} s, stopped for {stood:.2f} s")
        return found

    def close(self) -> None:
        for worker in self.started:
            worker.kill()


def largest(surveys: list[dict[str, Any]]) -> dict[str, int]:
    keys = ("threads", "descriptors", "segments")
    return {key: max(survey[key] for survey in surveys) for key in keys}


def trial(report: Report, settings: Settings) -> None:
    chaos = Chaos(settings)
    try:
        _observe(report, chaos)
    finally:
        chaos.close()


def _observe(report: Report, chaos: Chaos) -> None:
    begun = [worker.answer() for worker in chaos.living.values()]
    assert all(begun), "a worker did not start"
    time.sleep(CALM)
    calm = ask(list(chaos.living.values()), "survey")
    chaos.wreak()
    time.sleep(CALM)
    workers = list(chaos.living.values())
    for worker in workers:
        if worker not in chaos.started[: len(NAMES)]:
            worker.answer()  # that it has started
    resting = [answer for answer in ask(workers, "rest") if answer]
    final = [answer for answer in ask(workers, "drained") if answer]
    for worker in workers:
        worker.command("end")
    ends = [worker.process.wait(60) for worker in workers]

    outcomes = sum((Counter(each["outcomes"]) for each in final), Counter())
    happened = f"{chaos.kills} kills, {chaos.stops} stops; survivors' calls: {dict(outcomes)}"
    report.demand("survivors answer and end by themselves", happened,
                  len(resting) == len(final) == len(NAMES) and not any(ends))  # fmt: skip
    hung = sum(each["hung"] for each in resting)
    report.demand("no call without an outcome at the end", f"{hung} threads hang", not hung)
    late = chaos.late()
    report.demand(f"each call ends by its deadline + {ALLOWED:.0f} s, stops taken out",
                  f"{len(late)} late {late[:4]}", not late)  # fmt: skip
    held = {each["name"]: each["held"] for each in final if each["held"]}
    report.demand("no reference, value or running call is left", held or "none", not held)
    before, after = largest([each for each in calm if each]), largest(final)
    is_same = all(after[key] <= before[key] + SLACK for key in before)
    report.demand("no thread, descriptor or segment is left", f"{before} -> {after}", is_same)
