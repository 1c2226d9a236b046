"""A worker of the trial `chaos`: three threads that call the others in every way there is.

    python chaos_worker.py NAME FOLDER SEED

Commands come on stdin, a line each, and are answered by a line of JSON on stdout: `survey` says
what the worker holds; `rest` ends the threads; `drained` waits until nothing is held, and surveys;
`end` leaves the group. A call that takes longer than its deadline is written to FOLDER/late at
once, with the times of its begin and end. The trial knows when it had stopped this process.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from farcall import errors, rpc
from farcall.runtime.current import current_agent

NAMES = [f"w{index}" for index in range(6)]
TIMEOUT = 3.0  # seconds, of each call
EXPECTED = (errors.CallError, errors.UnknownWorker, errors.LinkError)

name, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
resting = threading.Event()
outcomes: Counter[str] = Counter()


def echo(value: Any) -> Any:
    return value


def nested(to: str, back: str, depth: int) -> int:
    return 0 if depth == 0 else rpc.rpc_sync(to, nested, args=(back, to, depth - 1))


def fetch(reference: Any) -> Any:
    return reference.to_here()


def give(value: Any) -> Any:
    return rpc.RRef(value)


class Calls:
    """One thread's calls. Each is timed on its own, since each has a deadline of its own."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(seed * 10 + number)

    def run(self) -> None:
        while not resting.is_set():
            try:
                self._one()
                outcomes["ok"] += 1
            except EXPECTED as error:
                outcomes[type(error).__name__] += 1

    def _one(self) -> None:
        to, other = self._random.sample([each for each in NAMES if each != name], 2)
        kind = self._random.randrange(7)
        if kind == 0:
            assert self._sync(to, echo, 1) == 1
        elif kind == 1:
            value = torch.ones(250_000)
            self._timed(kind, lambda: rpc.rpc_async(to, echo, (value,), timeout=TIMEOUT).wait())
        elif kind == 2:
            self._sync(to, nested, other, to, 2)
        elif kind == 3:
            made = rpc.remote(to, echo, args=(3,), timeout=TIMEOUT)
            assert self._timed(kind, lambda: made.to_here(timeout=TIMEOUT)) == 3
        elif kind == 4:
            made = rpc.remote(to, echo, args=(4,), timeout=TIMEOUT)
            assert self._sync(other, fetch, made) == 4
        elif kind == 5:
            given = self._sync(to, give, 5)
            assert self._timed(kind, lambda: given.to_here(timeout=TIMEOUT)) == 5
        else:
            self._timed(kind, lambda: self._many(to))

    def _many(self, to: str) -> None:
        for future in [rpc.rpc_async(to, echo, args=(n,), timeout=TIMEOUT) for n in range(20)]:
            future.wait()

    def _sync(self, to: str, function: Any, *args: Any) -> Any:
        return self._timed(
            function.__name__, lambda: rpc.rpc_sync(to, function, args=args, timeout=TIMEOUT)
        )

    def _timed(self, kind: Any, call: Any) -> Any:
        began = time.monotonic()
        try:
            return call()
        finally:
            ended = time.monotonic()
            if ended - began > TIMEOUT + 0.5:
                line = json.dumps([name, os.getpid(), str(kind), began, ended])
                with (folder / "late").open("a") as file:
                    file.write(line + "\n")


def held() -> dict[str, int]:
    """References, values and running calls that are still known here."""
    agent = current_agent()
    found = {key: count for key, count in agent.references.statistics().items() if count}
    if agent.references._values:
        found["values"] = len(agent.references._values)
    if agent.coordinator.active:
        found["running calls"] = agent.coordinator.active
    return found


def survey() -> dict[str, Any]:
    maps = Path("/proc/self/maps").read_text()
    return {
        "name": name,
        "outcomes": dict(outcomes),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": maps.count("memfd:farcall"),
        "resident_mb": int(Path("/proc/self/statm").read_text().split()[1]) // 256,
    }


def rest(threads: list[threading.Thread]) -> dict[str, Any]:
    """End the threads; how many of them hang."""
    resting.set()
    for thread in threads:
        thread.join(30)
    hung = sum(thread.is_alive() for thread in threads)
    return {"name": name, "hung": hung}


def drained() -> dict[str, Any]:
    """Wait until nothing is held any more; what is held all the same."""
    end = time.monotonic() + 20
    while held() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)
    return {**survey(), "held": held()}


def enter() -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=5.0)
    while True:
        try:
            rpc.init_rpc(name, rpc_backend_options=options)
        except errors.DuplicateWorker:  # the one that was killed is still being noticed
            time.sleep(0.2)
        else:
            return


def main() -> None:
    enter()
    threads = [threading.Thread(target=Calls(number).run, daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "end":
            break
        answer = {"survey": survey, "rest": lambda: rest(threads), "drained": drained}[command]()
        print(json.dumps(answer), flush=True)
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
