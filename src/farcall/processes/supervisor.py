"""Starts the workers of a group, restarts those that fail, and ends all when one fails for good.

Everything happens in the main thread, which gets events: a worker has ended, a signal came. Each
wait for a process is done by a thread of its own, and so is the wait for signals.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from farcall.processes.exits import MemoryKills, exit_status, in_words
from farcall.processes.output import Output
from farcall.processes.places import Place
from farcall.processes.workers import SSH_FAILED, Starter, WorkerProcess
from farcall.threads import FarcallThread

LONGEST_DELAY = 60.0  # seconds before a restart
_LAST_OUTPUT = (
    5.0  # seconds for what a worker has printed to be shown; longer if it is slow to read
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Rules(NamedTuple):
    """The rules by which a group is kept.

    Attributes:
        restarts: how often each worker may be started again after it failed.
        delay: seconds before the first restart of a worker; each later one takes twice as long.
        grace: seconds that workers get to end after they were asked to.
    """

    restarts: int
    delay: float
    grace: float

    def delay_after(self, restarts: int) -> float:
        """Return the seconds to wait before a worker that was restarted so often starts again."""
        doublings = min(restarts, 1000)  # a float has no room for more
        return min(self.delay * 2.0**doublings, LONGEST_DELAY)


class Launched:
    """A worker that is to run, from its first start to its end for good."""

    def __init__(self, place: Place, host: str | None, variables: Mapping[str, str]) -> None:
        self.place = place
        self.host = host
        self.variables = variables
        self.restarts = 0
        self.process: WorkerProcess | None = None
        self.starts_at: float | None = None

    @property
    def title(self) -> str:
        """The title for people."""
        where = "" if self.host is None else f" on {self.host}"
        return f"{self.place.name} (rank {self.place.rank}{where})"


class _Ended(NamedTuple):
    worker: Launched
    code: int


class _Failure(NamedTuple):
    worker: Launched
    code: int
    words: str


class Supervisor:
    """The workers of one launcher. To be used in the main thread.

    Args:
        workers: what to run.
        command: the program and its arguments.
        starter: starts processes.
        output: shows what they print.
        rules: how often to restart, and how fast.
        say: tells the user something.
    """

    def __init__(
        self,
        workers: Sequence[Launched],
        command: Sequence[str],
        starter: Starter,
        output: Output,
        rules: Rules,
        say: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._command = command
        self._starter = starter
        self._output = output
        self._rules = rules
        self._say = say
        self._events: SimpleQueue[_Ended | signal.Signals | str] = SimpleQueue()
        self._kills = MemoryKills()
        self._failure: _Failure | None = None
        self._status: int | None = None  # since the workers are asked to end
        self._kill_at: float | None = None

    def run(self, store: WorkerProcess | None) -> int:
        """Run all workers until they have ended.

        Args:
            store: where they meet, if this launcher hosts it. Without it they can't go on.

        Returns:
            The exit status: that of the worker that failed for good, 128 and its number if a
            signal ended the run, or 0.

        Raises:
            OSError: a worker can't be started.
        """
        with self._signals():
            try:
                for worker in self._workers:
                    self._start(worker)
                if store is not None:
                    self._in_a_thread(store, lambda code: f"the store ended: {in_words(code)}")
                while any(w.process or w.starts_at is not None for w in self._workers):
                    self._step()
            finally:
                self._signal(signal.SIGKILL)
        if self._failure is not None:
            self._tell_failure(self._failure)
        return self._status or 0

    def _step(self) -> None:
        """Wait for an event, or for the time of something, and see to it."""
        times = [w.starts_at for w in self._workers if w.starts_at is not None]
        if self._kill_at is not None:
            times.append(self._kill_at)
        try:
            seconds = max(min(times) - time.monotonic(), 0.0) if times else None
            event = self._events.get(timeout=seconds)
        except Empty:
            self._see_to_what_is_due(time.monotonic())
            return
        match event:
            case _Ended(worker, code):
                self._on_end(worker, code)
            case signal.Signals():
                self._on_signal(event)
            case reason:
                if self._status is None:
                    self._say(reason)
                    self._stop(signal.SIGTERM, 1)

    def _see_to_what_is_due(self, now: float) -> None:
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            self._say(f"still there after {self._rules.grace:g} s: {self._names()}; killed")
            self._signal(signal.SIGKILL)
        for worker in self._workers:
            if worker.starts_at is not None and worker.starts_at <= now:
                worker.starts_at = None
                self._start(worker)

    def _start(self, worker: Launched) -> None:
        variables = {**worker.variables, "FARCALL_RESTART_COUNT": str(worker.restarts)}
        name = worker.place.name
        process = self._starter.start_worker(name, worker.host, self._command, variables)
        worker.process = process
        self._in_a_thread(process, lambda code: _Ended(worker, code))

    def _in_a_thread(self, process: WorkerProcess, event: Callable[[int], _Ended | str]) -> None:
        FarcallThread(lambda: self._events.put(event(process.wait())), "farcall wait").start()

    def _on_end(self, worker: Launched, code: int) -> None:
        worker.process = None
        if code == 0 or self._status is not None:
            return
        words = self._in_words(worker, code)
        if worker.restarts < self._rules.restarts:
            delay = self._rules.delay_after(worker.restarts)
            worker.restarts += 1
            worker.starts_at = time.monotonic() + delay
            count = f"restart {worker.restarts} of {self._rules.restarts}"
            self._say(f"{worker.title}: {words}; {count} in {delay:g} s")
            return
        self._failure = _Failure(worker, code, words)
        if others := self._names():
            self._say(f"{worker.title}: {words}; ending {others}")
        self._stop(signal.SIGTERM, exit_status(code))

    def _in_words(self, worker: Launched, code: int) -> str:
        if worker.host is None:
            return in_words(code, self._kills.since())
        words = in_words(code)  # another machine's counter is not known here
        return f"{words} (could ssh not connect?)" if code == SSH_FAILED else words

    def _on_signal(self, number: signal.Signals) -> None:
        if self._status is not None and number is signal.SIGINT:
            self._signal(signal.SIGKILL)
            return
        if self._status is None:
            self._say(f"{number.name}: ending {self._names()}")
            self._stop(number, exit_status(-number))

    def _stop(self, number: signal.Signals, status: int) -> None:
        self._status = status
        for worker in self._workers:
            worker.starts_at = None
        self._signal(number)
        self._kill_at = time.monotonic() + self._rules.grace

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.signal(number)

    def _names(self) -> str:
        return ", ".join(w.place.name for w in self._workers if w.process is not None)

    def _tell_failure(self, failure: _Failure) -> None:
        name = failure.worker.place.name
        for worker in self._workers:
            self._output.wait(worker.place.name, _LAST_OUTPUT)
        words = "\n".join(self._output.last_words(name))
        again = f", after {n} restarts" if (n := failure.worker.restarts) else ""
        self._say(f"{failure.worker.title} failed{again}: {failure.words}\n{words}".rstrip())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Make events of signals, but of those that are ignored, as under nohup.

        A handler of Python's would not do: if a signal comes right before the main thread begins to
        wait, the handler runs only when that wait is over. C writes to a socket at once.
        """
        wanted = [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = FarcallThread(lambda: self._pass_on(reader), "farcall signals")
        thread.start()
        socket_before = signal.set_wakeup_fd(writer.fileno())
        before = {number: signal.signal(number, lambda *_: None) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(socket_before)
            writer.close()
            thread.join()

    def _pass_on(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number in _ENDING:
                        self._events.put(signal.Signals(number))
