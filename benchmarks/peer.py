"""One measurement process pair: rank 0 calls, rank 1 answers. Started by `turns.py`.

    python benchmarks/peer.py {farcall|torch|local} STORE [RANK]

Rank 0, which is meant when no rank is given, starts rank 1. It reads a JSON line from stdin for
each block, {"case": name, "count": n}, and answers with one on stdout: a list of n numbers, seconds
per call, or per iteration of a training case. A case goes on where its last block ended. The pair
shuts down at the end of stdin. `local` is one process alone, and knows the training cases only.
STORE is the path of a file in which the two find each other.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from cases import LOCAL, seconds_of
from rnn import MODULES

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def join(implementation: str, store: str, rank: int) -> Any:
    """The implementation's module for calls, of which this process is a worker now."""
    rpc = importlib.import_module(MODULES[implementation][0])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def end_if_failed(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        print(f"rank 1 ended with {process.returncode}", file=sys.stderr, flush=True)
        os._exit(1)


def end_with_parent() -> None:
    # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


@contextmanager
def pair(implementation: str, store: str) -> Iterator[Any]:
    """`join` as rank 0, with a rank 1 that ends with this process."""
    command = [sys.executable, "-W", "ignore", __file__, implementation, store, "1"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE)
    threading.Thread(target=end_if_failed, args=(other,), daemon=True).start()
    rpc = join(implementation, store, 0)
    yield rpc
    rpc.shutdown()
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


def call(implementation: str, store: str) -> None:
    """Rank 0."""
    # Whatever else is printed, here or by rank 1, goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if implementation == LOCAL:
            serve(implementation, None, answers)
        else:
            with pair(implementation, store) as rpc:
                serve(implementation, rpc, answers)
    except BaseException:
        # An orderly end could wait for ever: for rank 1, or for threads of the implementation.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def answer(implementation: str, store: str) -> None:
    """Rank 1."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    join(implementation, store, 1).shutdown()


def main() -> None:
    if sys.platform == "linux":
        # Its parent may be killed while this process is stopped and can't see the end of stdin.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    implementation, store, *rank = sys.argv[1:]
    if rank:
        answer(implementation, store)
    else:
        call(implementation, store)


if __name__ == "__main__":
    main()
