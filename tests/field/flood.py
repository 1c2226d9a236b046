"""One worker floods another: the calls of a third one stay as fast, and memory within bounds."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from crew import Member, assembled, leave_all
from report import Report, Settings

from farcall import rpc

NAMES = ("server", "flooder", "victim")
ANSWER = 10 << 20  # bytes
IN_FLIGHT = 64 << 20  # bytes: the default of `max_in_flight_bytes`
BURSTS, CALLS, PAUSE = 40, 100, 0.1  # seconds
FACTOR = 2.0
QUEUED = 256 << 20  # bytes: the default of `max_queued_bytes`
SEGMENTS = 1 << 30  # bytes in segments that a peer has not read (docs/native.md)
MARGIN = 64 << 20  # bytes, beside what may wait

_open: list[Any] = []
_flooding = threading.Event()


def no_op() -> None:
    pass


def big() -> torch.Tensor:
    return torch.ones(ANSWER // 4)


def wait_long(value: torch.Tensor | None = None) -> None:
    time.sleep(60.0)


def median() -> float:
    """Return the median of calls without content, in seconds, in bursts: floods come and go."""
    times = []
    for _ in range(BURSTS):
        for _ in range(CALLS):
            began = time.perf_counter()
            rpc.rpc_sync("server", no_op)
            times.append(time.perf_counter() - began)
        time.sleep(PAUSE)
    return statistics.median(times)


class Memory(NamedTuple):
    """Bytes of this process."""

    in_use: int  # of malloc's memory; memory that it has freed and keeps is not in use
    resident: int  # private, with what malloc keeps
    shared: int  # segments


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip


def memory() -> Memory:
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # glibc 2.33 or later
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    resident, shared = (int(status[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
    return Memory(info.uordblks + info.hblkhd, resident, shared)


def ask_for_big_answers(count: int) -> None:
    _open.extend(rpc.rpc_async("server", big, timeout=0) for _ in range(count))


def ask_for_slow_answers(count: int) -> None:
    _open.extend(rpc.rpc_async("server", wait_long, timeout=0) for _ in range(count))


def send_big_requests(seconds: float) -> int:
    """Return how many requests of 10 MB for a slow function were taken in that time."""
    value, taken, end = big(), 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        _open.append(rpc.rpc_async("server", wait_long, args=(value,), timeout=60))
        taken += left > 0
    return taken


def flood_without_pause() -> None:
    """Send requests without content from a thread, always with 100 of them open."""

    def flood() -> None:
        while _flooding.is_set():
            for future in [rpc.rpc_async("server", no_op) for _ in range(100)]:
                future.wait()

    _flooding.set()
    threading.Thread(target=flood, daemon=True).start()


def end_flood() -> None:
    _flooding.clear()


def trial(report: Report, settings: Settings) -> None:
    for flood in (_unread_answers, _slow_requests, _busy_requests):
        with assembled(f"{settings.folder}/flood{flood.__name__}") as crew:
            server, flooder, victim = (crew.member(name) for name in NAMES)
            for rank, member in enumerate((server, flooder, victim)):
                member.start(_enter, member.name, rank, crew.init_method)
            for member in (server, flooder, victim):
                member.result()
            flood(report, server, flooder, victim)


def _enter(name: str, rank: int, init_method: str) -> None:
    rpc.init_rpc(name, rank=rank, world_size=3,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method))  # fmt: skip
    if name != "server":
        rpc.rpc_sync("server", no_op)


def _compare(report: Report, what: str, before: float, during: float) -> None:
    report.demand(
        f"{what}: median of others changes < {FACTOR:.0f}x",
        f"{before * 1e6:.0f} -> {during * 1e6:.0f} us ({during / before:.2f}x)",
        during < FACTOR * before,
    )


def _memory(report: Report, what: str, before: Memory, after: Memory, waiting: int) -> None:
    in_use, resident, shared = ((b - a) >> 20 for a, b in zip(before, after, strict=True))
    most, segments = (waiting + MARGIN) >> 20, (waiting + SEGMENTS + MARGIN) >> 20
    report.demand(
        f"{what}: memory bounded",
        f"{in_use} MB more in use (at most {most}), {shared} MB in segments (at most {segments}); "
        f"malloc keeps {resident - in_use} MB",
        in_use <= most and shared <= segments,
    )


def _unread_answers(report: Report, server: Member, flooder: Member, victim: Member) -> None:
    what = "100 answers of 10 MB not read"
    before, small = victim.run(median), server.run(memory)
    flooder.run(ask_for_big_answers, 100)
    flooder.stop()
    time.sleep(3.0)
    _compare(report, what, before, victim.run(median))
    _memory(report, what, small, server.run(memory), IN_FLIGHT)


def _slow_requests(report: Report, server: Member, flooder: Member, victim: Member) -> None:
    what = "5000 requests for a slow function"
    before, small = victim.run(median), server.run(memory)
    flooder.run(ask_for_slow_answers, 5000)
    time.sleep(1.0)
    _compare(report, what, before, victim.run(median))
    flooder.start(send_big_requests, 6.0)
    _compare(report, "and requests of 10 MB for it", before, victim.run(median))
    _memory(report, "and requests of 10 MB for it", small, server.run(memory), QUEUED)


def _busy_requests(report: Report, server: Member, flooder: Member, victim: Member) -> None:
    before = victim.run(median)
    flooder.run(flood_without_pause)
    _compare(report, "100 requests open all the time", before, victim.run(median))
    flooder.run(end_flood)
    leave_all(server, flooder, victim)
