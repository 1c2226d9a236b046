"""Real workers use the paths and the transport that their options or the environment name."""

from __future__ import annotations

import logging
import operator
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, call, join, leave, leave_all
from known_secrets import SECRET

from farcall.runtime.current import current_agent
from farcall.runtime.membership.endpoints import NATIVE

needs_native = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)


def paths() -> tuple[set[str], set[str]]:
    """Return the ways to this worker for others, and the paths of its links."""
    endpoint = current_agent().endpoint
    reached = {url.partition(":")[0] for url in endpoint.addresses}
    return reached, {link.description.split()[0] for link in endpoint.links()}


def mapped() -> int:
    """Return how many pieces of farcall's shared memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:farcall")


def undo_import_for_tls() -> None:
    """Undo the import of the server that members are forked from; another one shows again."""
    del sys.modules["cryptography"]


def has_library_for_tls() -> bool:
    return "cryptography" in sys.modules


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


def test_library_for_tls_is_not_imported_with_farcall() -> None:
    program = "import sys; from farcall import rpc; print('cryptography' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")
@pytest.mark.parametrize("transport", ["socket", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(
    ("options", "is_needed"),
    [
        ({"paths": ["unix"]}, False),
        ({"paths": ["tcp"]}, True),
        ({"paths": ["unix"], "secret": SECRET}, True),  # others may be on another host
    ],
    ids=["one host", "over TCP", "several hosts"],
)
def test_library_for_tls_is_imported_at_the_start_of_workers_that_need_it(
    crew: Crew, transport: str, options: dict[str, Any], is_needed: bool
) -> None:
    # A visitor from another test, `farcall status` say, may make a worker need it, but not thrice.
    for attempt in range(3):
        found = imports_for_tls(crew, f"{crew.init_method}-{attempt}", [transport], options)
        if found == [is_needed] * 4:
            break
    assert found == [is_needed] * 4


def imports_for_tls(
    crew: Crew, init_method: str, transports: list[str], options: dict[str, Any]
) -> list[bool]:
    """Return whether each of two workers has the library when it has started, and after a call."""
    members = first, second = crew.members(2)
    for rank, member in enumerate(members):
        member.run(undo_import_for_tls)
        assert not member.run(has_library_for_tls)
        place = (member.name, rank, 2, init_method)
        member.start(join, *place, transports=transports, **options)
    for member in members:
        member.result()
    found = [one.run(has_library_for_tls) for one in members]
    assert first.run(call, second.name, operator.add, 1, 2) == 3
    found += [one.run(has_library_for_tls) for one in members]
    leave_all(*members)
    return found


def together(crew: Crew, *options: dict[str, Any]) -> list[set[str]]:
    """Return the paths of links between two workers with these options, which call both ways."""
    members = crew.members(2)
    for rank, (member, own) in enumerate(zip(members, options, strict=True)):
        member.start(join, member.name, rank, 2, crew.init_method, **own)
    for member in members:
        member.result()
    for member, other in zip(members, ("w1", "w0"), strict=True):
        tensor = torch.arange(100_000.0)
        assert torch.equal(member.run(call, other, torch.neg, tensor), -tensor)
    taken = [member.run(paths)[1] for member in members]
    leave_all(*members)
    return taken


NATIVE_WORKER: dict[str, Any] = {"transports": ["native"]}
SOCKET_WORKER: dict[str, Any] = {"transports": ["socket"]}


@needs_native
@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (NATIVE_WORKER, NATIVE_WORKER, "shm"),
        (NATIVE_WORKER, SOCKET_WORKER, "unix"),
        (NATIVE_WORKER, {**NATIVE_WORKER, "paths": ["unix", "tcp"]}, "unix"),
        ({**NATIVE_WORKER, "paths": ["tcp"]}, NATIVE_WORKER, "tcp"),
        ({**NATIVE_WORKER, "paths": ["tcp"]}, SOCKET_WORKER, "tcp"),
        ({**NATIVE_WORKER, "paths": ["shm"]}, {**NATIVE_WORKER, "paths": ["shm"]}, "shm"),
        ({**NATIVE_WORKER, "paths": ["shm"]}, SOCKET_WORKER, "unix"),
    ],
    ids=[
        "native",
        "native and socket",
        "one without shared memory",
        "one with TCP only",
        "TCP only and socket",
        "shared memory only",
        "shared memory only and socket",
    ],
)
def test_two_workers_take_the_best_path_that_both_have(
    crew: Crew, one: dict[str, Any], other: dict[str, Any], path: str, secret: str | None
) -> None:
    options = [{**own, "secret": secret} for own in (one, other)]
    if secret:  # else a worker with a secret listens on all interfaces
        options = [{**own, "listen": "127.0.0.1"} for own in options]
    assert together(crew, *options) == [{path}, {path}]


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
