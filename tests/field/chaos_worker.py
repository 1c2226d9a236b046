"""A worker of the trial `chaos`: three threads that call the others in every way there is.

    farcall launch ... chaos_worker.py FOLDER SEED PAUSE

It tells the trial who it is before it has loaded torch, then that it is a member of the group, and
then answers commands: `survey` says what the process holds; `rest` ends the threads; `drained`
waits until nothing is held, and surveys; `end` leaves the group. Its ledger says how calls ended.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client
from pathlib import Path

folder, seed, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank, restarts = int(os.environ["RANK"]), int(os.environ["FARCALL_RESTART_COUNT"])
trial = Client(str(folder / "trial"))
trial.send((rank, restarts, os.getpid()))

import threading  # noqa: E402
from typing import Any  # noqa: E402

from calls import AMOUNTS, Load, drain  # noqa: E402
from ledger import THREADS, Ledger  # noqa: E402

from farcall import errors, rpc  # noqa: E402

TIMEOUT = 3.0  # seconds, of each call
EXPECTED = (errors.CallError, errors.UnknownWorker, errors.LinkError)

name = f"worker{rank}"
others = [f"worker{n}" for n in range(int(os.environ["WORLD_SIZE"])) if n != rank]
ledger = Ledger(folder, f"{name}.{restarts}", TIMEOUT)
resting = threading.Event()


def call(thread: int) -> None:
    """Call the others until all are to rest, with a pause in seconds after each call."""
    its_seed = hash((seed, rank, restarts, thread))
    load = Load(others, its_seed, ledger.timed(thread), TIMEOUT)
    kinds = list(AMOUNTS)
    while not resting.wait(pause):
        try:
            load.make(load.random.choice(kinds))
        except EXPECTED:
            continue
        except Exception:
            ledger.note_unexpected()


def survey() -> dict[str, Any]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:farcall"),
    }


def rest(threads: list[threading.Thread]) -> int:
    """End the threads; how many of them hang."""
    resting.set()
    for thread in threads:
        thread.join(30)
    return sum(thread.is_alive() for thread in threads)


def drained() -> dict[str, Any]:
    held = drain()
    return {**survey(), "held": held}


def main() -> None:
    ledger.open()
    options = rpc.RpcBackendOptions(rpc_timeout=TIMEOUT)
    rpc.init_rpc(name, rpc_backend_options=options)
    threads = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    trial.send("is a member")
    commands = {"survey": survey, "rest": lambda: rest(threads), "drained": drained}
    while (command := trial.recv()) != "end":
        trial.send(commands[command]())
    rpc.shutdown()


if __name__ == "__main__":
    main()
