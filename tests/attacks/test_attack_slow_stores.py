"""A store that answers slowly, never, or without end: `init_rpc` ends, and calls go on."""

from __future__ import annotations

import operator
import os
import subprocess
import sys

import honest
import pytest
import slow_stores
from crew import Crew, call
from hostile_store import in_memory
from patience import PATIENCE
from slow_stores import STORES, EndlessLog, HeldStore

from farcall import rpc
from farcall.errors import FarcallError

ENVIRONMENT = {"FARCALL_SECRET": honest.SECRET}
BRIEFLY = 0.9  # seconds of a wait that ends by its own limit
GROWTH = 64 << 20  # bytes
NAMES = 20_000  # in the log of a group, without a limit
ASKED = 2_000  # names that a worker asks for at most

PROGRAM = """
import sys
from farcall import rpc
options = rpc.RpcBackendOptions(init_method=sys.argv[1], rpc_timeout=0.9)
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
"""

_stores: list[HeldStore] = []


# Steps.


def try_to_start(size: int | None, rank: int = 1, name: str = "w1", **options: object) -> str:
    """Start a worker; return the error of farcall's if that fails."""
    made = rpc.RpcBackendOptions(listen="127.0.0.1", **options)  # type: ignore[arg-type]
    try:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=made)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_at_held_store(
    path: str, name: str, rank: int, size: int | None, seconds: float | None, timeout: float
) -> str:
    _stores[:] = [HeldStore(path, seconds)]
    return try_to_start(size, rank, name, store=_stores[0], rpc_timeout=timeout)


def start_at_store_that_answers(path: str, name: str, rank: int) -> str:
    """Start at one that is held from then on."""
    _stores[:] = [HeldStore(path)]
    _stores[0].may_answer.set()
    return try_to_start(None, rank, name, store=_stores[0], rpc_timeout=PATIENCE)


def hold() -> None:
    _stores[0].may_answer.clear()


def release() -> None:
    _stores[0].may_answer.set()


def call_until(to: str, timeout: float) -> str:
    """Call; return the error."""
    try:
        rpc.rpc_sync(to, operator.add, args=(1, 2), timeout=timeout)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def call_often(to: str) -> int:
    return sum(rpc.rpc_sync(to, operator.add, args=(1, 2)) for _ in range(100))


def names_asked_for() -> int:
    """Start at a store whose log of names has no end; return for how many the worker has asked."""
    log = EndlessLog(NAMES)
    assert try_to_start(None, 0, "w0", store=in_memory(log), rpc_timeout=PATIENCE) == ""
    assert [worker.name for worker in rpc.workers()] == ["w0"]
    rpc.shutdown(graceful=False)
    return log.asked


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("size", [2, None], ids=["fixed group", "open group"])
def test_start_at_a_hostile_store_ends_in_time_and_costs_little(
    crew: Crew, kind: str, size: int | None
) -> None:
    port = crew.member("store").run(slow_stores.serve_store, kind)
    worker = crew.member("w1", **ENVIRONMENT)
    memory = worker.run(honest.reset_peak)
    url = f"tcp://127.0.0.1:{port}"
    error = worker.run(try_to_start, size, init_method=url, rpc_timeout=BRIEFLY)
    assert error.startswith(("RendezvousTimeout", "RendezvousError")), error
    assert worker.run(honest.peak_bytes) - memory < GROWTH


@pytest.mark.parametrize("kind", STORES)
def test_program_ends_though_a_hostile_store_never_answers(crew: Crew, kind: str) -> None:
    port = crew.member("store").run(slow_stores.serve_store, kind)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"tcp://127.0.0.1:{port}"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "farcall.errors.Rendezvous" in done.stderr


@pytest.mark.parametrize("size", [2, None], ids=["fixed group", "open group"])
@pytest.mark.parametrize("seconds", [0.3, None], ids=["slow", "silent"])
def test_start_at_a_held_store_ends_in_time(
    crew: Crew, size: int | None, seconds: float | None
) -> None:
    worker = crew.member("w0", **ENVIRONMENT)
    path = crew.init_method.removeprefix("file://")
    error = worker.run(start_at_held_store, path, "w0", 0, size, seconds, BRIEFLY)
    is_open = size is None and seconds is not None  # it needs not many answers
    assert error.startswith("RendezvousTimeout") or (is_open and error == ""), error


def test_calls_to_known_workers_go_on_while_a_hostile_store_answers_nothing(
    crew: Crew, transport: str
) -> None:
    environment = {**ENVIRONMENT, "FARCALL_TRANSPORTS": transport}
    first, second = (crew.member(name, **environment) for name in ("w0", "w1"))
    path = crew.init_method.removeprefix("file://")
    for rank, member in enumerate((first, second)):
        assert member.run(start_at_store_that_answers, path, member.name, rank) == ""
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    first.run(hold)
    threads = first.run(honest.count_threads)
    memory = first.run(honest.reset_peak)
    for number in range(4):
        assert first.run(call_until, f"nobody{number}", BRIEFLY).startswith("RpcTimeout")
        assert first.run(call_often, "w1") == 300
    assert second.run(call_often, "w0") == 300
    assert first.run(honest.count_threads) <= threads + 8
    assert first.run(honest.peak_bytes) - memory < GROWTH
    first.run(release)
    assert first.run(call_until, "nobody", PATIENCE).startswith("UnknownWorker")


def test_log_of_names_without_end_is_not_read_to_its_end(crew: Crew) -> None:
    assert crew.member("w0", **ENVIRONMENT).run(names_asked_for) <= 2 * ASKED
