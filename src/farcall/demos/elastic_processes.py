"""Worker processes that come back when they were killed. Knows nothing of farcall."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Self

from farcall.demos.launch import interrupts_blocked


class ElasticProcesses:
    """One process for each name; one that a signal ends is started again. For a `with` block.

    At the end of the block none is left. A process imports once what all need, and is forked for
    each, so that a new one is there within tenths of a second.

    Args:
        run: what a process runs; called with its name.
        names: of the processes.
        modules: what the processes import.
        on_failure: called by another thread, with a line that says what happened, if a process ends
            otherwise: nothing is started any more.
    """

    def __init__(
        self,
        run: Callable[[str], None],
        names: Sequence[str],
        modules: Sequence[str],
        on_failure: Callable[[str], None],
    ) -> None:
        self._run = run
        self._names = names
        self._on_failure = on_failure
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._running: dict[str, ForkServerProcess] = {}
        self._end, self._open = os.pipe()  # the first is readable once the second is closed
        self._thread = threading.Thread(target=self._follow, name="demo processes", daemon=True)

    def __enter__(self) -> Self:
        with interrupts_blocked():
            for name in self._names:
                self._start(name)
        self._thread.start()
        return self

    def _start(self, name: str) -> None:
        process = self._context.Process(target=self._run, args=(name,), name=name, daemon=True)
        process.start()
        self._running[name] = process

    def _follow(self) -> None:
        while True:
            sentinels = [process.sentinel for process in self._running.values()]
            ready = connection.wait([self._end, *sentinels])
            if self._end in ready:
                return
            for name, process in list(self._running.items()):
                if process.sentinel not in ready:
                    continue
                process.join()
                if process.exitcode is None or process.exitcode >= 0:
                    self._on_failure(f"{name} ended with exit code {process.exitcode}")
                    return
                self._start(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._open)
        self._thread.join()
        os.close(self._end)
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()
