"""Six workers of `farcall launch --restart` that call each other while one of them is killed or
stopped every second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from launching import LAUNCH, environment
from ledger import Ledger
from report import Report, Settings

from farcall.processes.dying import start

WORKERS = 6
CALM = 3.0  # seconds, at the start and before the end
TIMEOUT = 3.0  # of each call, as in chaos_worker
KILLED = 0.4  # of the workers that something happens to; the others are stopped
REST = 30.0  # seconds: links look each five seconds which segments they have not used since
SLACK = 2  # of threads, descriptors and segments, in comparison with the calm at the start
PATIENCE = 600.0  # seconds, for a worker's start or answer
MARK = "FIELD_CHAOS"  # in the environment of all processes of a run


class Worker:
    """A process, from the moment when it says who it is."""

    def __init__(self, pipe: Connection, folder: Path) -> None:
        rank, self.restarts, self.pid = pipe.recv()
        self.name = f"worker{rank}"
        self.ledger = Ledger(folder, f"{self.name}.{self.restarts}", TIMEOUT)
        self.stops: list[tuple[float, float]] = []
        self.is_stopped_until: float | None = None
        self.died = 0.0
        self._stopped_at = 0.0
        self._is_member = False
        self._pipe = pipe
        self._process = os.pidfd_open(self.pid)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        select.select([self._process], [], [])
        self._resumed()
        self.died = time.monotonic()
        self.close()

    def stop(self, until: float) -> None:
        self._stopped_at = time.monotonic()
        self._signal(signal.SIGSTOP)
        self.is_stopped_until = until

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._resumed()

    def _resumed(self) -> None:
        if self.is_stopped_until is not None:
            self.stops.append((self._stopped_at, time.monotonic()))
            self.is_stopped_until = None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # found by the number of restarts
            signal.pidfd_send_signal(self._process, number)

    def overruns(self) -> list[tuple[float, str]]:
        """Return how late each late call was, in seconds after its deadline, without stops."""
        late = [(each.kind, each.began, each.ended) for each in self.ledger.late()]
        end = self.died or time.monotonic()
        late += [("no outcome", began, end) for began in self.ledger.running()]
        return [
            (ended - began - self._stood(began, ended) - TIMEOUT, f"{self.name} {kind}")
            for kind, began, ended in late
        ]

    def _stood(self, began: float, ended: float) -> float:
        """Return for how many of these seconds the process was stopped."""
        return sum(max(0.0, min(end, ended) - max(start, began)) for start, end in self.stops)

    def is_member(self, patience: float = 0.0) -> bool:
        """Return whether it has joined the group; wait for that so long."""
        self._is_member = self._is_member or self.answer(patience) == "is a member"
        return self._is_member

    def was_late(self) -> bool:
        """Return whether it has ended by itself, and was stopped before it was a member."""
        has_ended = bool(select.select([self._process], [], [], 0.0)[0])
        return has_ended and bool(self.stops) and not self.is_member()

    def command(self, command: str) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def answer(self, patience: float = PATIENCE) -> Any:
        """Return the next answer, or None if the process has ended or says nothing."""
        with contextlib.suppress(EOFError, OSError):
            return self._pipe.recv() if self._pipe.poll(patience) else None
        return None

    def close(self) -> None:
        self._pipe.close()
        os.close(self._process)


class Launcher:
    """`farcall launch` with its workers; ended with the block."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.folder
        self._output = (self._folder / "launch.log").open("w")
        self._workers: SimpleQueue[Connection] = SimpleQueue()
        self._listener = Listener(str(self._folder / "trial"), backlog=WORKERS)
        threading.Thread(target=self._accept, daemon=True).start()
        options = ("-n", WORKERS, "--restart", int(settings.seconds) + 1, "--restart-delay", 0)
        program = (Path(__file__).parent / "chaos_worker.py", self._folder)
        self.process: subprocess.Popen[bytes] = start(
            [*LAUNCH, *map(str, (*options, *program, settings.seed, settings.pause))],
            environment(**{MARK: str(self._folder)}),
            stdout=self._output,
            stderr=self._output,
        )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._workers.put(self._listener.accept())

    def started(self, patience: float = 0.0) -> Worker | None:
        """Return a worker that has started or been started again; None if there is none in time."""
        with contextlib.suppress(Empty):
            return Worker(self._workers.get(timeout=patience), self._folder)
        return None

    def held(self) -> dict[str, int]:
        """Return the things that the launcher itself holds."""
        own = Path(f"/proc/{self.process.pid}")
        found = {"threads": "task", "descriptors": "fd"}
        return {what: len(list((own / where).iterdir())) for what, where in found.items()}

    def left(self) -> list[str]:
        """Processes of this run that are there."""
        mark = f"{MARK}={self._folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.close()
        self._output.close()


class Chaos:
    def __init__(self, settings: Settings, launcher: Launcher) -> None:
        self._seconds = settings.seconds
        self._random = random.Random(settings.seed)
        self._launcher = launcher
        self.all: list[Worker] = []
        self.living: dict[str, Worker] = {}
        self.kills = self.stops = 0
        self.late = 0  # newcomers whose start took too long, since they were stopped

    def meet(self, patience: float = 0.0) -> None:
        """Learn of workers that have started; wait until all have."""
        end = time.monotonic() + patience
        self._miss_the_late()
        while len(self.living) < WORKERS:
            worker = self._launcher.started(max(0.0, end - time.monotonic()))
            if worker is None:
                return
            self.all.append(worker)
            self.living[worker.name] = worker

    def _miss_the_late(self) -> bool:
        """Return whether newcomers have ended by themselves that were stopped in their start."""
        late = [name for name, worker in self.living.items() if worker.was_late()]
        for name in late:
            self.living.pop(name).close()
        self.late += len(late)
        return bool(late)

    def settle(self) -> None:
        """Wait until all workers are members."""
        self.meet(PATIENCE)
        while not all(worker.is_member(PATIENCE) for worker in self.living.values()):
            if not self._miss_the_late():
                return  # one has ended for no reason that is known here
            self.meet(PATIENCE)

    def wreak(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            time.sleep(1.0)
            self.meet()
            self._resume(time.monotonic())
            workers = [*self.living.values()]
            # On a slow machine there would be no group if members were killed before others start.
            is_group = sum(worker.is_member() for worker in workers) > WORKERS / 2
            if is_group and self._random.random() < KILLED:
                self._kill(workers)
            else:
                self._stop([w for w in workers if w.is_stopped_until is None])
        self._resume(float("inf"))

    def _kill(self, workers: list[Worker]) -> None:
        self.living.pop(self._random.choice(workers).name).kill()
        self.kills += 1

    def _stop(self, workers: list[Worker]) -> None:
        if workers:
            seconds = self._random.uniform(0.3, 8.0)
            self._random.choice(workers).stop(time.monotonic() + seconds)
            self.stops += 1

    def _resume(self, now: float) -> None:
        for worker in self.living.values():
            if worker.is_stopped_until is not None and worker.is_stopped_until <= now:
                worker.resume()

    def ask(self, command: str) -> list[Any]:
        """Return the answers of the living; those that don't answer are left out."""
        for worker in self.living.values():
            worker.command(command)
        answers = [worker.answer() for worker in self.living.values()]
        return [answer for answer in answers if answer is not None]


def largest(surveys: list[dict[str, Any]]) -> dict[str, int]:
    keys = ("threads", "descriptors", "segments")
    return {key: max(survey[key] for survey in surveys) for key in keys}


def is_same(before: dict[str, int], after: dict[str, int]) -> bool:
    return all(after[key] <= before[key] + SLACK for key in before)


def at_rest(chaos: Chaos, calm: dict[str, int]) -> dict[str, int]:
    """Return the most that a worker holds, once its links have given back what only calls need."""
    end = time.monotonic() + REST
    while not is_same(calm, after := largest(chaos.ask("survey"))) and time.monotonic() < end:
        time.sleep(0.5)
    return after


def trial(report: Report, settings: Settings) -> None:
    launcher = Launcher(settings)
    chaos = Chaos(settings, launcher)
    try:
        _observe(report, settings, launcher, chaos)
    finally:
        launcher.close()
        for worker in chaos.living.values():
            worker.close()


def _observe(report: Report, settings: Settings, launcher: Launcher, chaos: Chaos) -> None:
    chaos.meet(PATIENCE)
    begun = sum(worker.is_member(PATIENCE) for worker in chaos.living.values())
    assert begun == WORKERS, "a worker did not start"
    time.sleep(CALM)
    calm, launcher_before = largest(chaos.ask("survey")), launcher.held()
    chaos.wreak()
    chaos.settle()
    time.sleep(CALM)
    hung = chaos.ask("rest")
    final = chaos.ask("drained")
    after = at_rest(chaos, calm)
    launcher_after = launcher.held()
    restarts = sum(worker.restarts for worker in chaos.living.values())
    for worker in chaos.living.values():
        worker.command("end")
    status = launcher.process.wait(PATIENCE)

    _judge_calls(report, settings.allowed, chaos, hung)
    ends = (
        f"{chaos.kills} kills, {chaos.stops} stops, {chaos.late} stopped for too long in init_rpc"
    )
    report.demand("each end is one restart, survivors answer and end by themselves",
                  f"{ends}, {restarts} restarts, exit {status}",
                  restarts == chaos.kills + chaos.late and not status
                  and len(final) == WORKERS)  # fmt: skip
    held = [answer["held"] for answer in final if answer["held"]]
    report.demand("no reference, value, running call, context or pass is left",
                  held or "none", not held)  # fmt: skip
    report.demand("no thread, descriptor or segment of a worker is left",
                  f"{calm} -> {after}", is_same(calm, after))  # fmt: skip
    report.demand("nor of the launcher", f"{launcher_before} -> {launcher_after}",
                  is_same(launcher_before, launcher_after))  # fmt: skip
    left = launcher.left()
    report.demand("no process is left", left or "none", not left)


def _judge_calls(report: Report, allowed: float, chaos: Chaos, hung: list[int]) -> None:
    counts = sum((worker.ledger.counts() for worker in chaos.all), Counter())
    outcomes: Counter[str] = Counter()
    for (_, outcome), count in counts.items():
        outcomes[outcome] += count
    unexpected = "".join(worker.ledger.unexpected() for worker in chaos.all)
    report.demand("results are right, errors are those of calls",
                  f"{sum(outcomes.values())} calls: {json.dumps(outcomes)} {unexpected[-2000:]}",
                  not unexpected)  # fmt: skip
    compared = counts["gradients", "value"]
    report.demand("gradients are those of torch in one process",
                  f"{counts['backward', 'value']} completed passes, {compared} also at their end",
                  compared > 0 and not unexpected)  # fmt: skip
    unfinished = sum(len(worker.ledger.running()) for worker in chaos.living.values())
    report.demand("no call without an outcome at the end",
                  f"{unfinished} calls, {sum(hung)} threads hang",
                  not unfinished and len(hung) == WORKERS and not any(hung))  # fmt: skip
    overruns = sorted((each for worker in chaos.all for each in worker.overruns()), reverse=True)
    late = [f"{kind} {seconds:.2f} s" for seconds, kind in overruns if seconds > allowed]
    worst = f"{overruns[0][0]:.2f} s ({overruns[0][1]})" if overruns else "none"
    report.demand(f"each call ends by its deadline + {allowed:g} s, stops taken out",
                  f"{len(late)} late {late[:4]}; the worst: {worst}", not late)  # fmt: skip
