"""One caller floods a worker: what that costs the worker's memory, and another caller's time.

    python benchmarks/flood.py [--megabytes 10] [--count 60] [--bound 64] [--transport native]

The flooder sends `--count` requests of `--megabytes` for a function that sleeps. Shown are the
resident memory of the callee, the most that it had queued, and the median of a third worker's no-op
before and during the flood; once with `max_queued_bytes` as given, once without a bound.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from farcall import rpc
from farcall.runtime.current import default_agent

UNBOUNDED = 2**62
SLEEP = 1.0  # seconds that each request takes
CALLS = 2000


def no_op() -> None:
    """Do nothing: the function that the third worker calls."""


def slow(_: bytes) -> None:
    time.sleep(SLEEP)


def resident() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def queued() -> int:
    """Bytes of requests that are queued here."""
    agent = default_agent()
    assert agent is not None
    return sum(peer.admission.queued_bytes for peer in agent.directory.all())


def median_no_op() -> float:
    """Seconds."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        rpc.rpc_sync("callee", no_op)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def work(name: str, rank: int, store: str, arguments: Any, bound: int, results: Any) -> None:
    options = rpc.RpcBackendOptions(
        init_method=f"file://{store}",
        rpc_timeout=0,
        transports=(arguments.transport,),
        max_queued_bytes=bound,
        num_worker_threads=4,
    )
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    if name == "flooder":
        results.get()  # the other one has measured
        size = arguments.megabytes << 20
        futures = [
            rpc.rpc_async("callee", slow, args=(b"x" * size,)) for _ in range(arguments.count)
        ]
        for future in futures:
            future.wait()
    elif name == "other":
        median_no_op()  # the first calls are slower
        before = median_no_op()
        at_rest = rpc.rpc_sync("callee", resident)
        results.put(None)
        time.sleep(2 * SLEEP)
        during, most, most_queued = [], 0, 0
        for _ in range(5):
            during.append(median_no_op())
            most = max(most, rpc.rpc_sync("callee", resident))
            most_queued = max(most_queued, rpc.rpc_sync("callee", queued))
        after = statistics.median(during)
        print(
            f"{'no bound' if bound == UNBOUNDED else f'{bound >> 20} MiB':>9}: "
            f"callee grew by {(most - at_rest) / 1e6:6.0f} MB, {most_queued / 1e6:5.0f} MB queued; "
            f"no-op {before * 1e6:4.0f} us before, {after * 1e6:4.0f} us during "
            f"({after / before:.2f} times)",
            flush=True,
        )
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--bound", type=int, default=64, help="MiB")
    parser.add_argument("--transport", default="native")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for bound in (UNBOUNDED, arguments.bound << 20):
        results = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            processes = [
                context.Process(target=work, args=(name, rank, store, arguments, bound, results))
                for rank, name in enumerate(("callee", "flooder", "other"))
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
