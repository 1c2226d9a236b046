"""Chromium without a window, told what to do by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import PATIENCE

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
# Descriptors of the protocol's pipes in the browser's process.
COMMANDS, EVENTS = 3, 4
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # For less work: no process for drawing, the same frame for each page of the tab, and scripts
    # that are compiled only as far as they run, by the compilers that are fast themselves.
    "--in-process-gpu",
    "--disable-features=RenderDocument",
    "--js-flags=--max-lazy --no-opt --no-maglev",
)


class Browser:
    """One hidden tab, of which nothing is drawn.

    `errors` has what its pages have logged or raised, each with its address.
    """

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._pending = b""
        self._calls = 0
        self._session = ""
        self._loaded: set[str] = set()  # ids of pages
        self.errors: list[str] = []
        tab = self._call("Target.createTarget", url="about:blank", hidden=True)["targetId"]
        attached = self._call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)
        screen = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **screen)

    def open(self, url: str) -> None:
        """Load a page, and wait until its scripts have run."""
        page = self._call("Page.navigate", url=url)["loaderId"]
        while page not in self._loaded:  # there may be a word of the page before
            self._read()

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript; of a promise, what it comes to."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._calls += 1
        call = {"id": self._calls, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(call | session).encode() + b"\0")
        while (answer := self._read()).get("id") != self._calls:
            pass
        assert "error" not in answer, answer
        return answer["result"]  # type: ignore[no-any-return]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            assert select.select([self._events], [], [], PATIENCE)[0], "the browser does not answer"
            data = os.read(self._events, 1 << 16)
            assert data, "the browser has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(f"{entry.get('url', '')}: {entry['text']}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(f"{details.get('url', '')}: {details}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(f"console.error: {params['args']}")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile in a folder; end it at the end of the block."""
    reads, writes = zip(os.pipe(), os.pipe(), strict=True)
    # None of them may be 3 or 4 already.
    commands, events = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (reads[0], writes[1]))
    os.close(reads[0])
    os.close(writes[1])
    pid = os.posix_spawn(
        CHROMIUM,
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        dict(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, commands, COMMANDS),
            (os.POSIX_SPAWN_DUP2, events, EVENTS),
        ],
    )
    os.close(commands)
    os.close(events)
    try:
        yield Browser(writes[0], reads[1])
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(writes[0])
        os.close(reads[1])
