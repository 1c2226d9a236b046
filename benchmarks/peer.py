"""One process that is measured, with the workers that it calls. Started by `turns.py`.

    python benchmarks/peer.py IMPLEMENTATION STORE WORLD [RANK]

Rank 0, which is meant when no rank is given, starts the others of the world (`plans.WORLDS`). It
reads a JSON line from stdin for each block, {"case": name, "count": n}, and answers with one on
stdout: a list of n numbers, seconds per call, step or iteration. A case goes on where its last
block ended. All shut down at the end of stdin. `local` is one process alone, and knows the training
cases only. STORE is the path of a file in which the workers find each other.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from cases import seconds_of
from plans import LOCAL, WORLDS
from workers import end_with_parent, join


def end_if_failed(process: subprocess.Popen[bytes], rank: int) -> None:
    if process.wait():
        print(f"rank {rank} ended with {process.returncode}", file=sys.stderr, flush=True)
        os._exit(1)


def end_with_stdin() -> None:
    # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


@contextmanager
def joined(implementation: str, store: str, world_name: str) -> Iterator[Any]:
    """`join` as rank 0, with the other workers, which end with this process."""
    command = [sys.executable, "-W", "ignore", __file__, implementation, store, world_name]
    world = WORLDS[world_name]
    others = []
    for rank in range(1, world.size):
        other = subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE)
        threading.Thread(target=end_if_failed, args=(other, rank), daemon=True).start()
        others.append(other)
    rpc = join(implementation, store, world, 0)
    yield rpc
    rpc.shutdown()
    for other in others:
        other.wait()


def serve(implementation: str, rpc: Any, answers: TextIO) -> None:
    cases: dict[str, Iterator[float]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        case = request["case"]
        if case not in cases:
            cases[case] = seconds_of(case, implementation, rpc)
        seconds = list(itertools.islice(cases[case], request["count"]))
        print(json.dumps(seconds), file=answers, flush=True)


def call(implementation: str, store: str, world: str) -> None:
    """Rank 0."""
    # Whatever else is printed, here or by other ranks, goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if implementation == LOCAL or WORLDS[world].size == 1:
            serve(implementation, None, answers)
        else:
            with joined(implementation, store, world) as rpc:
                serve(implementation, rpc, answers)
    except BaseException:
        # An orderly end could wait for ever: for other ranks, or for the implementation's threads.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def answer(implementation: str, store: str, world: str, rank: int) -> None:
    """Any other rank."""
    threading.Thread(target=end_with_stdin, daemon=True).start()
    join(implementation, store, WORLDS[world], rank).shutdown()


def main() -> None:
    end_with_parent()
    torch.set_num_threads(1)
    implementation, store, world, *rank = sys.argv[1:]
    if rank:
        answer(implementation, store, world, int(rank[0]))
    else:
        call(implementation, store, world)


if __name__ == "__main__":
    main()
