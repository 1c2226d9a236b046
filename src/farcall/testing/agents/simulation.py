"""One schedule of whole workers: processes, what goes wrong, and the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from farcall.testing.agents.faults import AgentFaults, moments
from farcall.testing.agents.planted import AgentBug, planted
from farcall.testing.agents.oracle import AgentOracle
from farcall.testing.agents.program import Plan, Program
from farcall.testing.simulation import Result
from farcall.testing.system.installing import System, installed
from farcall.testing.system.network import Host
from farcall.testing.system.scheduler import Process, SimThread, Stuck
from farcall.testing.system.store import Mode


class Notes(logging.Handler):
    """Takes down what farcall logs, and what it says of its own mistakes."""

    def __init__(self, note: Callable[..., None], oracle: AgentOracle) -> None:
        super().__init__(logging.DEBUG)
        self._take_down = note
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._take_down("log:", text)
        if "internal error" in text:
            self._oracle.violate("AGT-9", text)


class Simulation:
    """A schedule."""

    def __init__(self, seed: int, faults: AgentFaults | None, bug: AgentBug | None) -> None:
        random = Random(seed)
        drawn = AgentFaults.draw(random)
        self.seed = seed
        self._bug = bug
        self.faults = drawn if faults is None else faults
        slowest = random.choice((0.002, 0.02, 0.2))
        self.system = System(random.getrandbits(64), self.faults.preempt, slowest)
        self.scheduler = self.system.scheduler
        self.random = Random(random.getrandbits(64))
        self.plan = Plan(self.random)
        self.oracle = AgentOracle(self.system.network, self.system.store)
        self.log: list[str] = []
        self.programs: dict[str, tuple[Process, Program]] = {}
        self._hosts: list[Host] = []

    def note(self, *what: Any) -> None:
        """Take down what happens."""
        self.log.append(f"{self.scheduler.now:10.4f} {' '.join(map(str, what))}")

    def run(self) -> Result:
        """Run it."""
        notes = Notes(self.note, self.oracle)
        logger = logging.getLogger("farcall")
        before = logger.level, logger.propagate
        logger.addHandler(notes)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        try:
            with planted(self._bug), installed(self.system):
                self._run()
        finally:
            logger.removeHandler(notes)
            logger.setLevel(before[0])
            logger.propagate = before[1]
        violations = tuple(self.oracle.violations)
        return Result(self.seed, self.faults, self.scheduler.events, violations, self.log)  # type: ignore[arg-type]

    def _run(self) -> None:
        for name in self.plan.names:
            if not self._hosts or self.random.random() < 0.7:
                self._hosts.append(self.system.network.add_host(f"h{len(self._hosts)}"))
            self._begin(name, self.random.choice(self._hosts))
        self._draw_faults()
        try:
            self.scheduler.run()
        except Stuck as stuck:
            self.oracle.violate("AGT-9", str(stuck))
        for failure in self.scheduler.failures:
            self.oracle.violate("AGT-9", failure)
        self.oracle.check_calls()

    def _begin(self, name: str, host: Host) -> None:
        process = Process(name, host)
        process.world = self.oracle
        program = Program(self.system, self.plan, self.oracle, name, self.note)
        process.on_kill.append(partial(self.system.kernel.end_process, process))
        thread = SimThread(self.scheduler, process, partial(self._main, program), "main")
        process.main = thread
        self.programs[name] = process, program
        self.oracle.here[name] = process
        self.scheduler.start(thread)

    def _main(self, program: Program) -> None:
        try:
            program.run()
        finally:
            program.has_ended = True
            if all(one.has_ended or not process.is_alive for process, one in self.programs.values()):
                self.scheduler.finish()

    # Faults.

    def _draw_faults(self) -> None:
        faults, random = self.faults, self.random
        start = 2.0 if self.plan.is_fixed else 0.0
        seconds = self.plan.quiet_at - start

        def put(rate: float, strike: Callable[[], None]) -> None:
            for moment in moments(random, rate, seconds):
                self.scheduler.at(start + moment, strike)

        for name in self.plan.names:
            put(faults.stand, partial(self._stand, name))
            put(faults.kill, partial(self._kill, name))
            put(faults.interrupt, partial(self._interrupt, name))
        put(faults.cut, self._cut)
        put(faults.dark, self._darken)
        put(faults.slow_store, partial(self._change_store, Mode.SLOW))
        put(faults.dark_store, partial(self._change_store, Mode.DARK))
        put(faults.dead_store, partial(self._change_store, Mode.DEAD))

    def _seconds(self, most: float) -> float:
        drawn = self.random.choice((0.1, 1.0, most)) * self.random.random()
        return min(drawn, max(0.0, self.plan.quiet_at - self.scheduler.now))

    def _stand(self, name: str) -> None:
        seconds = self._seconds(50.0)
        self.note(f"{name} stands still for {seconds:.2f} s")
        self.scheduler.stand(self.programs[name][0], seconds)

    def _kill(self, name: str) -> None:
        process, program = self.programs[name]
        if not process.is_alive:
            return
        if self.plan.is_fixed and len(self.oracle.here) < 2:
            return
        self.note(f"{name} is killed")
        self.oracle.ended.setdefault(name, []).append((process, self.scheduler.now))
        del self.oracle.here[name]
        self.scheduler.kill(process)
        if not self.plan.is_fixed:
            self.scheduler.after(self._seconds(30.0), partial(self._begin, name, process.host))

    def _interrupt(self, name: str) -> None:
        process, program = self.programs[name]
        if program.agent is not None and process.is_alive:
            self.note(f"Ctrl-C in {name}")
            self.scheduler.interrupt(process)

    def _cut(self) -> None:
        hosts = [*self._hosts, self.system.store.host]
        one, other = self.random.choice(hosts), self.random.choice(hosts)
        if one is not other:
            seconds = self._seconds(100.0)
            self.note(f"the network between {one} and {other} is cut for {seconds:.2f} s")
            self.system.network.cut(one, other, seconds)

    def _darken(self) -> None:
        host, seconds = self.random.choice(self._hosts), self._seconds(100.0)
        self.note(f"{host} is dark for {seconds:.2f} s")
        self.system.network.darken(host, seconds)

    def _change_store(self, mode: Mode) -> None:
        store = self.system.store
        if store.mode is not Mode.UP:
            return
        seconds = self._seconds(60.0)
        self.note(f"the store is {mode.name} for {seconds:.2f} s")
        store.mode = mode
        store.outages.append((self.scheduler.now, self.scheduler.now + seconds))

        def mend() -> None:
            self.note("the store is up")
            if mode is Mode.DEAD:
                store.start_again()
            store.mode = Mode.UP

        self.scheduler.after(seconds, mend)


def simulate_agents(
    seed: int, faults: AgentFaults | None = None, bug: AgentBug | None = None
) -> Result:
    """Run a schedule of whole workers.

    Args:
        seed: all of it is drawn from.
        faults: what goes wrong; drawn from the seed when None.
        bug: a mistake to plant.
    """
    return Simulation(seed, faults, bug).run()
