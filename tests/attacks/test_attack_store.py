"""An attacker who controls the store sends no call astray, runs nothing, and ends no worker."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attacker
import honest
import pytest
import relay
from certificates import Authority
from crew import Crew, Member, assembled, call, join, leave_all
from hostile_store import HostileStore, Junk, Replace, Rewrite, SwapRecords, at_file, in_memory
from launching import free_port
from patience import PATIENCE

from farcall import rpc
from farcall.errors import FarcallError

ENVIRONMENT = {"FARCALL_SECRET": honest.SECRET}
WITH_SECRET = {"secret": honest.SECRET}

Options = dict[str, Any]


# Steps.

_stores: list[HostileStore] = []


def join_hostile(
    name: str, rank: int, size: int | None, file: str, rewrite: Rewrite, **options: Any
) -> str:
    """Join by a store in the attacker's hands; return the error if that fails."""
    attacker.wait_briefly_for_belief()
    store = at_file(file, rewrite)
    _stores[:] = [store]
    made = rpc.RpcBackendOptions(
        store=store, rpc_timeout=PATIENCE, listen="127.0.0.1", paths=("tcp",), **options
    )
    try:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=made)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def try_join(*place: Any, **options: Any) -> str:
    """Join; return the error if that fails."""
    try:
        join(*place, **options)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


_lines: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _lines.append(record.getMessage())


def hear() -> None:
    """Keep what the log says from now on."""
    logging.getLogger("farcall").addHandler(Lines())


def heard(text: str) -> int:
    """Return how many lines have a text."""
    return sum(text in line for line in _lines)


def was_rewritten() -> int:
    return _stores[0].rewritten


def own_name() -> str:
    return rpc.get_worker_info().name


def try_junk(part: str, junk: bytes, size: int | None) -> str:
    """Start and end a worker of a group of one at a store full of junk; return the error."""
    store = in_memory(Junk(part, junk))
    options = rpc.RpcBackendOptions(store=store, rpc_timeout=0.5, listen="127.0.0.1")
    try:
        rpc.init_rpc("w0", rank=0, world_size=size, rpc_backend_options=options)
    except FarcallError:
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    try:
        with contextlib.suppress(FarcallError):
            rpc.rpc_sync("w1", operator.add, args=(1, 2), timeout=0.5)
        rpc.shutdown(graceful=False)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture
def between(crew: Crew) -> Member:
    return crew.member("relay")


@pytest.mark.parametrize("size", [2, None], ids=["fixed group", "open group"])
def test_relay_that_the_store_names_runs_nothing(
    crew: Crew, transport: str, between: Member, trap: Path, size: int | None
) -> None:
    # It has as many digits as the one that stands for it: else the record would be none.
    port = free_port()
    caught = between.run(relay.begin, 0, ("127.0.0.1", int(port)))
    file = crew.init_method.removeprefix("file://")
    environment = {**ENVIRONMENT, "FARCALL_TRANSPORTS": transport}
    second, first = (crew.member(name, **environment) for name in ("w1", "w0"))
    # In a fixed group w0, which does not believe the record of w1, ends the wait of both.
    options = {"listen": f"127.0.0.1:{port}"}
    second.start(try_join, "w1", 1, size, crew.init_method, **options)
    if size is None:
        assert second.result() == ""
    redirect = Replace({f"127.0.0.1:{port}": f"127.0.0.1:{caught}"})
    problem = first.run(join_hostile, "w0", 0, size, file, redirect)
    if size:
        problem = problem or second.result()
    got = honest.Ended(error=problem)
    if not problem:
        got = first.run(honest.try_call, "w1", operator.add, 1, 2)
    assert first.run(was_rewritten) >= 1
    assert got.error or got.value == 3
    frames = b"".join(make(str(trap)) for make in attacker.CVES.values())
    between.run(relay.inject, frames, True)
    between.run(relay.inject, attacker.hostile_answers(str(trap)), False)
    if not problem:
        first.run(honest.ends, "w1", operator.add, 1, 2)
        assert second.run(call, "w1", operator.add, 1, 2) == 3
    assert not trap.exists()


def join_three(
    crew: Crew, transport: str, size: int | None, options: Sequence[Options]
) -> list[Member]:
    """Return three members, of which w1 and w2 have joined, or wait for w0."""
    members = [crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport) for rank in range(3)]
    for rank, member in enumerate(members[1:], 1):
        own = {"listen": "127.0.0.1", **options[rank]}
        member.start(join, member.name, rank, size, crew.init_method, **own)
        if size is None:
            member.result()
    return members


def assert_calls_go_where_they_should(first: Member, problem: str) -> None:
    assert first.run(was_rewritten) >= 1
    for key, name in (("w1", "w1"), ("w2", "w2"), (1, "w1"), (2, "w2")):
        got = honest.Ended(error=problem)
        if not problem:
            got = first.run(honest.try_call, key, own_name)
        assert got.error or got.value == name, key


@pytest.mark.parametrize(
    ("size", "keys"),
    [(3, ("1", "2")), (None, ("w1", "w2"))],
    ids=["ranks of a fixed group", "names of an open group"],
)
def test_swapped_records_send_no_call_to_another_worker(
    crew: Crew, transport: str, size: int | None, keys: tuple[str, str]
) -> None:
    members = join_three(crew, transport, size, [WITH_SECRET] * 3)
    file = crew.init_method.removeprefix("file://")
    swap = SwapRecords(file, keys)
    problem = members[0].run(join_hostile, "w0", 0, size, file, swap, **WITH_SECRET)
    assert_calls_go_where_they_should(members[0], problem)


def check_swapped_records(crew: Crew, members: list[Member], options: Options) -> None:
    """Swap the addresses and the incarnations of two records; check where calls go."""
    first, second = ([*m.run(honest.urls), str(m.run(attacker.me)[2])] for m in members[1:])
    both = [*zip(first, second, strict=True), *zip(second, first, strict=True)]
    file = crew.init_method.removeprefix("file://")
    swap = Replace(dict(both))
    problem = members[0].run(join_hostile, "w0", 0, None, file, swap, **options)
    assert_calls_go_where_they_should(members[0], problem)


def test_record_with_parts_of_another_workers_sends_no_call_to_it(
    crew: Crew, transport: str
) -> None:
    members = join_three(crew, transport, None, [WITH_SECRET] * 3)
    check_swapped_records(crew, members, WITH_SECRET)


def with_certificates(folder: Path, *, names: bool) -> list[Options]:
    """Return the options of three workers that have certificates and no secret."""
    authority = Authority(folder)
    return [{"tls": authority.issue(f"w{rank}").config(names=names)} for rank in range(3)]


@pytest.mark.parametrize("names", [False, True], ids=["any name", "names bound"])
def test_store_sends_no_call_astray_where_workers_have_certificates(
    crew: Crew, transport: str, tmp_path: Path, names: bool
) -> None:
    options = with_certificates(tmp_path, names=names)
    members = join_three(crew, transport, None, options)
    check_swapped_records(crew, members, options[0])


@pytest.mark.parametrize("size", [3, None], ids=["fixed group", "open group"])
def test_records_that_are_swapped_send_no_call_astray_where_workers_have_certificates(
    crew: Crew, transport: str, tmp_path: Path, size: int | None
) -> None:
    options = with_certificates(tmp_path, names=False)
    members = join_three(crew, transport, size, options)
    file = crew.init_method.removeprefix("file://")
    swap = SwapRecords(file, ("1", "2") if size else ("w1", "w2"))
    problem = members[0].run(join_hostile, "w0", 0, size, file, swap, **options[0])
    assert_calls_go_where_they_should(members[0], problem)


@pytest.mark.parametrize("rewrite", [attacker.without_signature, attacker.signed_otherwise])
def test_record_that_no_certificate_signed_is_ignored_and_named_once(
    crew: Crew, transport: str, tmp_path: Path, rewrite: Rewrite
) -> None:
    options = with_certificates(tmp_path, names=False)
    members = join_three(crew, transport, None, options)
    file = crew.init_method.removeprefix("file://")
    members[0].run(hear)
    problem = members[0].run(join_hostile, "w0", 0, None, file, rewrite, **options[0])
    assert problem == ""
    for key in ("w1", 1):
        assert "UnknownWorker" in members[0].run(honest.try_call, key, own_name).error
    assert members[0].run(honest.try_call, "w2", own_name).value == "w2"
    assert members[0].run(heard, "holds something at farcall/open/name/w1") == 1


PARTS = ("name/", "rank/", "gate", "member", "fixed", "endpoint", "")
JUNK = (
    *(b"", b"\xff\xfe" * 40, b"{}", b"[]", b"null", b"0", b'{"worker": 7}'),
    *(b"[" * 100_000, b'"' + b"x" * 1_000_000 + b'"'),
)


def try_all_junk(part: str, size: int | None) -> list[tuple[bytes, str]]:
    """Return which junk raised which error."""
    tried = ((junk[:20], try_junk(part, junk, size)) for junk in JUNK)
    return [(junk, problem) for junk, problem in tried if problem]


@pytest.fixture(scope="module")
def at_junk(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, int | None], Member]]:
    """Return workers at stores full of junk: they wait in vain most of the time, all at once."""
    with assembled(f"{tmp_path_factory.mktemp('junk')}/store") as crew:
        workers = {(part, size): crew.member("w0", **ENVIRONMENT)
                   for part in PARTS for size in (1, None)}  # fmt: skip
        for place, worker in workers.items():
            worker.start(try_all_junk, *place)
        yield workers


@pytest.mark.parametrize("size", [1, None], ids=["fixed group", "open group"])
@pytest.mark.parametrize("part", PARTS)
def test_junk_in_the_store_raises_only_errors_of_farcall(
    at_junk: dict[tuple[str, int | None], Member], part: str, size: int | None
) -> None:
    assert at_junk[part, size].result() == []


@pytest.mark.parametrize("size", [2, 0], ids=["fixed", "open"])
@pytest.mark.parametrize("secret", [None, honest.SECRET], ids=["stranger", "knows the secret"])
def test_newcomer_takes_no_place_of_a_worker(
    crew: Crew, transport: str, secret: str | None, size: int, tmp_path: Path
) -> None:
    environment = honest.alone(tmp_path) if secret is None else ENVIRONMENT
    first, second = honest.pair(
        crew, transport, environment=environment, size=size, listen="127.0.0.1"
    )
    sessions = []
    for url in first.run(honest.urls):
        if url.startswith("unix:") and secret is None:
            continue  # it would be refused to another user
        with contextlib.suppress(OSError, RuntimeError):
            session = attacker.enter(url, secret, name="w1", id=1)
            sessions.append(session)
            session.say(attacker.harmless())
            session.answer()
    assert first.run(call, "w1", os.getpid) == second.process.pid
    assert second.run(call, "w0", os.getpid) == first.process.pid
    for session in sessions:
        session.hang_up()
    assert first.run(call, "w1", os.getpid) == second.process.pid
    leave_all(first, second)


def test_stranger_with_the_incarnation_of_a_worker_does_not_declare_it_dead(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    name, number, incarnation = second.run(attacker.me)
    first.run(hold_reference, "w1")
    for url in first.run(honest.urls):
        if url.startswith("unix:"):
            continue  # it would be refused to another user
        with contextlib.suppress(OSError, RuntimeError):
            attacker.enter(url, None, name=name, id=number, incarnation=incarnation).hang_up()
    assert first.run(call, "w0", operator.add, 1, 2) == 3  # by the thread that hears of losses
    assert first.run(use_reference) == 7
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)


_held: list[rpc.RRef[int]] = []


def hold_reference(to: str) -> None:
    _held[:] = [rpc.remote(to, operator.add, args=(3, 4))]
    assert _held[0].to_here() == 7


def use_reference() -> int:
    return _held[0].to_here()
