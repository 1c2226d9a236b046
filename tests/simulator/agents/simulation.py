"""One schedule of whole workers: processes, what goes wrong, and the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from farcall.log import get_logger
from simulator.agents.faults import AgentFaults, moments
from simulator.agents.oracle import AgentOracle
from simulator.agents.planted import AgentBug, planted
from simulator.agents.program import Plan, Program
from simulator.schedule import Event, Result, Schedule, Script
from simulator.system.installing import System, installed
from simulator.system.network import Host
from simulator.system.scheduler import Process, SimThread, Stuck
from simulator.system.store import Mode


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


class AgentSchedule(Schedule):
    """A schedule. Its inputs are what goes wrong and what workers do."""

    def __init__(self, seed: int, bug: AgentBug | None, script: Script | None) -> None:
        super().__init__(seed, script)
        self._bug = bug
        random = self._random
        self._faults = AgentFaults.draw(random)
        slowest = random.choice((0.002, 0.02, 0.2))
        self._system = System(random.getrandbits(64), self._faults.preempt, slowest)
        self._scheduler = self._system.scheduler
        self._plan = Plan(random)
        self._oracle = AgentOracle(self._system.network, self._system.store)
        self._programs: dict[str, tuple[Process, Program]] = {}
        self._hosts: list[Host] = []

    def _note(self, *what: object) -> None:
        text = " ".join(map(str, what)).replace("\n", " | ")
        self._log.append(Event(self._scheduler.now, (text,)))

    def _play(self) -> None:
        notes = Notes(self._note, self._oracle)
        logger = get_logger("farcall")
        before = logger.level, logger.propagate
        logger.addHandler(notes)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        try:
            with planted(self._bug), installed(self._system):
                self._run()
        finally:
            logger.removeHandler(notes)
            logger.setLevel(before[0])
            logger.propagate = before[1]
        self._violations += self._oracle.violations

    def _run(self) -> None:
        for name in self._plan.names:
            if not self._hosts or self._random.random() < 0.7:
                self._hosts.append(self._system.network.add_host(f"h{len(self._hosts)}"))
            self._begin(name, self._random.choice(self._hosts))
        self._draw_faults()
        try:
            self._scheduler.run()
        except Stuck as stuck:
            self._note(stuck)
            self._oracle.violate("AGT-9", str(stuck).partition("\n")[0])
        for failure in self._scheduler.failures:
            self._oracle.violate("AGT-9", failure)
        self._oracle.check_calls()

    def _begin(self, name: str, host: Host) -> None:
        process = Process(name, host)
        process.world = self._oracle
        program = Program(self._system, self._plan, self._oracle, name, self._note, self._happens)
        process.on_kill.append(partial(self._system.kernel.end_process, process))
        thread = SimThread(self._scheduler, process, partial(self._main, program), "main")
        process.main = thread
        self._programs[name] = process, program
        self._oracle.here[name] = process
        self._scheduler.start(thread)

    def _main(self, program: Program) -> None:
        try:
            program.run()
        finally:
            program.has_ended = True
            if all(
                one.has_ended or not process.is_alive for process, one in self._programs.values()
            ):
                self._scheduler.finish()

    # Faults.

    def _draw_faults(self) -> None:
        faults, random = self._faults, self._random
        start = 2.0 if self._plan.is_fixed else 0.0
        seconds = self._plan.quiet_at - start

        def put(rate: float, strike: Callable[[], None]) -> None:
            for moment in moments(random, rate, seconds):
                if self._happens():
                    self._scheduler.at(start + moment, strike)

        for name in self._plan.names:
            put(faults.stand, partial(self._stand, name))
            put(faults.kill, partial(self._kill, name))
            put(faults.interrupt, partial(self._interrupt, name))
        put(faults.cut, self._cut)
        put(faults.dark, self._darken)
        put(faults.slow_store, partial(self._change_store, Mode.SLOW))
        put(faults.dark_store, partial(self._change_store, Mode.DARK))
        put(faults.dead_store, partial(self._change_store, Mode.DEAD))

    def _seconds(self, most: float) -> float:
        drawn = self._random.choice((0.1, 1.0, most)) * self._random.random()
        return min(drawn, max(0.0, self._plan.quiet_at - self._scheduler.now))

    def _stand(self, name: str) -> None:
        seconds = self._seconds(50.0)
        self._note(f"{name} stands still for {seconds:.2f} s")
        self._scheduler.stand(self._programs[name][0], seconds)

    def _kill(self, name: str) -> None:
        process, _ = self._programs[name]
        if not process.is_alive:
            return
        if self._plan.is_fixed and len(self._oracle.here) < 2:
            return
        self._note(f"{name} is killed")
        self._oracle.ended.setdefault(name, []).append((process, self._scheduler.now))
        del self._oracle.here[name]
        self._scheduler.kill(process)
        if not self._plan.is_fixed:
            self._scheduler.after(self._seconds(30.0), partial(self._begin, name, process.host))

    def _interrupt(self, name: str) -> None:
        process, program = self._programs[name]
        if program.agent is not None and process.is_alive:
            self._note(f"Ctrl-C in {name}")
            self._scheduler.interrupt(process)

    def _cut(self) -> None:
        hosts = [*self._hosts, self._system.store.host]
        one, other = self._random.choice(hosts), self._random.choice(hosts)
        if one is not other:
            seconds = self._seconds(100.0)
            self._note(f"the network between {one} and {other} is cut for {seconds:.2f} s")
            self._system.network.cut(one, other, seconds)

    def _darken(self) -> None:
        host, seconds = self._random.choice(self._hosts), self._seconds(100.0)
        self._note(f"{host} is dark for {seconds:.2f} s")
        self._system.network.darken(host, seconds)

    def _change_store(self, mode: Mode) -> None:
        store = self._system.store
        if store.mode is not Mode.UP:
            return
        seconds = self._seconds(60.0)
        self._note(f"the store is {mode.name} for {seconds:.2f} s")
        store.mode = mode
        store.outages.append((self._scheduler.now, self._scheduler.now + seconds))

        def mend() -> None:
            self._note("the store is up")
            if mode is Mode.DEAD:
                store.start_again()
            store.mode = Mode.UP

        self._scheduler.after(seconds, mend)


def simulate_agents(
    seed: int, *, bug: AgentBug | None = None, script: Script | None = None
) -> Result:
    """Run a schedule of whole workers.

    Args:
        seed: all of it is drawn from.
        bug: a mistake to plant.
        script: which inputs happen; None: all.
    """
    return AgentSchedule(seed, bug, script).run()
