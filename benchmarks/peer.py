"""One process that is measured, with the workers that it calls. Started by `turns.py`.

    python benchmarks/peer.py IMPLEMENTATION STORE WORLD

It is rank 0 of the world (`plans.WORLDS`), and forks the others. It reads a JSON line from stdin
for each block, {"case": name, "count": n}, and answers with one on stdout: a list of n steps, each
a pair of seconds (per call, step or iteration) and of the value that was computed or null. A case
goes on where its last block ended. All shut down at the end of stdin. `local` is one process alone,
and knows the RNNs only. STORE is the path of a file in which the workers find each other.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

import torch
from cases import steps_of
from plans import LOCAL, WORLDS, World
from steps import Step
from workers import CONTEXT, end_with_parent, join, module_of


def end_if_failed(process: BaseProcess, rank: int) -> None:
    process.join()
    if process.exitcode:
        print(f"rank {rank} ended with {process.exitcode}", file=sys.stderr, flush=True)
        os._exit(1)


def answer(implementation: str, store: str, world: World, rank: int) -> None:
    """Answer calls, as any rank but 0."""
    end_with_parent()
    # Whatever random numbers are drawn on this worker are the same ones for each implementation.
    torch.manual_seed(rank)
    join(implementation, store, world, rank).shutdown()


@contextmanager
def joined(implementation: str, store: str, world: World) -> Iterator[Any]:
    """`join` as rank 0, with the other workers, which end with this process."""
    module_of(implementation)
    others = [
        CONTEXT.Process(target=answer, args=(implementation, store, world, rank))
        for rank in range(1, world.size)
    ]
    for other in others:
        other.start()
    watches = [
        threading.Thread(target=end_if_failed, args=(other, rank), daemon=True)
        for rank, other in enumerate(others, start=1)
    ]
    for watch in watches:
        watch.start()
    rpc = join(implementation, store, world, 0)
    yield rpc
    rpc.shutdown()
    for watch in watches:
        watch.join()


def serve(implementation: str, rpc: Any, answers: TextIO) -> None:
    cases: dict[str, Iterator[Step]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        case = request["case"]
        if case not in cases:
            cases[case] = steps_of(case, implementation, rpc)
        steps = list(itertools.islice(cases[case], request["count"]))
        print(json.dumps(steps), file=answers, flush=True)


def set_threads(world: World) -> None:
    """Set the threads of this process and those that it forks."""
    if world.threads is not None:
        torch.set_num_threads(world.threads)


def call(implementation: str, store: str, world: World) -> None:
    """Make the calls of rank 0."""
    # Whatever else is printed, here or by other ranks, goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if implementation == LOCAL or world.size == 1:
            serve(implementation, None, answers)
        else:
            with joined(implementation, store, world) as rpc:
                serve(implementation, rpc, answers)
    except BaseException:
        # An orderly end could wait forever: for other ranks, or for the implementation's threads.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    end_with_parent()
    implementation, store, world = sys.argv[1:]
    set_threads(WORLDS[world])
    call(implementation, store, WORLDS[world])


if __name__ == "__main__":
    main()
