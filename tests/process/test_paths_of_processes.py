"""Real workers use the paths and the transport that their options or the environment name."""

from __future__ import annotations

import logging
import operator
import sys

import pytest
from crew import Crew, call, join, leave, leave_all

from farcall.runtime.context import current_agent
from farcall.runtime.endpoints import NATIVE


def paths() -> tuple[set[str], set[str]]:
    """What others can reach this worker by, and what its links take."""
    endpoint = current_agent().endpoint
    reached = {url.partition(":")[0] for url in endpoint.addresses}
    return reached, {link.description.split()[0] for link in endpoint.links()}


def join_without_native(times: int, *args: object, **options: object) -> list[str]:
    """Join again and again where nothing was compiled; the warnings that were logged."""
    sys.modules[NATIVE] = None  # type: ignore[assignment]
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farcall").addHandler(handler)
    for _ in range(times):
        join(*args, **options)  # type: ignore[arg-type]
        leave()
    return logged


def test_environment_keeps_workers_of_one_host_on_tcp(crew: Crew) -> None:
    first, second = crew.members(2, FARCALL_PATHS="tcp", FARCALL_TRANSPORTS="socket")
    for rank, member in enumerate((first, second)):
        member.start(join, member.name, rank, 2, crew.init_method)
    for member in (first, second):
        member.result()
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert first.run(paths) == second.run(paths) == ({"tcp"}, {"tcp"})
    leave_all(first, second)


@pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")
def test_options_keep_workers_off_tcp(crew: Crew) -> None:
    first, second = crew.group(2, paths=["unix"], transports=["socket"])
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert first.run(paths) == second.run(paths) == ({"unix", "tcp"}, {"unix"})
    leave_all(first, second)


@pytest.mark.skipif(sys.platform != "linux", reason="it is no warning elsewhere")
def test_process_warns_once_that_it_has_no_native_transport(crew: Crew) -> None:
    (warning,) = crew.member().run(join_without_native, 2, "w0", 0, 1, "tcp://127.0.0.1:0")
    assert "farcall runs without its native transport" in warning


def test_native_transport_that_can_not_be_had_is_no_silent_fallback(crew: Crew) -> None:
    member = crew.member(FARCALL_TRANSPORTS="native")
    member.start(join_without_native, 1, "w0", 0, 1, "tcp://127.0.0.1:0")
    error = member.fails()
    assert type(error) is ValueError
    assert "'native': " in str(error)
