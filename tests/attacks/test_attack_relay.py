"""An attacker who controls the path between two hosts reads, changes and runs nothing."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attacker
import honest
import pytest
import relay
from certificates import Authority
from crew import Crew, Member, call, join, leave_all
from networks import enter, network

PORT = 29541
MARKER = "the arguments of a call between two hosts"

TENSOR = 4 << 20  # bytes, which go over all streams of a link

CREDENTIALS = ("secret", "authenticated only", "certificates")


class Scene(NamedTuple):
    """w0 and w1 on two hosts, and the relay on the router between them."""

    first: Member
    second: Member
    relay: Member


def start(crew: Crew, transport: str, options: dict[str, Any]) -> Iterator[Scene]:
    with network() as net:
        relay.intercept(net, [net.a, net.b])
        between = crew.member("relay")
        between.run(enter, net.router)
        between.run(relay.begin, PORT)
        members = [crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport) for rank in range(2)]
        for rank, (member, host) in enumerate(zip(members, (net.a, net.b), strict=True)):
            member.run(enter, host)
            member.run(honest.look_again_soon)
            listen = f"{net.addresses[host]}:{PORT}"
            member.start(join, member.name, rank, 2, crew.init_method, listen=listen, **options)
        for member in members:
            member.result()
        # The control: calls do go through the relay.
        assert members[0].run(call, "w1", operator.add, 1, 2) == 3
        assert between.run(relay.has_seen, b"")[1] > 0
        yield Scene(*members, between)


@pytest.fixture(params=CREDENTIALS)
def scene(
    request: pytest.FixtureRequest, crew: Crew, transport: str, tmp_path: Path
) -> Iterator[Scene]:
    """Yield a scene with each credential."""
    options: dict[str, Any] = {"secret": honest.SECRET}
    if request.param == "authenticated only":
        options["encrypt"] = False
    if request.param == "certificates":
        options = {"tls": Authority(tmp_path).issue("worker").config()}
    yield from start(crew, transport, options)


@pytest.fixture
def encrypted(request: pytest.FixtureRequest, crew: Crew, transport: str) -> Iterator[Scene]:
    yield from start(crew, transport, {"secret": honest.SECRET})


def test_relay_reads_nothing_of_a_call(encrypted: Scene) -> None:
    first, second, between = encrypted
    large = [MARKER] * 100_000  # over several streams, if there are any
    for to, member in (("w1", first), ("w0", second)):
        assert member.run(call, to, honest.echo, MARKER) == MARKER
        assert member.run(call, to, honest.echo, large) == large
        assert member.run(honest.echo_tensor_of, to, MARKER, 2 << 20)
    found, size = between.run(relay.has_seen, MARKER[:16].encode())
    assert size > 2 << 20
    assert not found
    leave_all(first, second)


def test_relay_reads_nothing_between_workers_with_certificates(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    options = {"tls": Authority(tmp_path).issue("worker").config()}
    for first, second, between in start(crew, transport, options):
        assert first.run(call, "w1", honest.echo, MARKER) == MARKER
        assert not between.run(relay.has_seen, MARKER.encode())[0]
        leave_all(first, second)


FORTH = {"there": True, "back": False}


def test_bytes_that_a_relay_alters_are_never_believed(scene: Scene) -> None:
    first, second, between = scene
    sent: list[bytes] = []
    for way, forth in FORTH.items():
        for change in relay.CHANGES:
            assert first.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
            between.run(relay.arm, change, forth)
            sent.append(secrets.token_bytes(2000))
            # A byte that is missing at the end is waited for: such a call is delayed.
            got = first.run(honest.try_call, "w1", honest.note, sent[-1], timeout=0.9)
            assert got.error or got.value == sent[-1], (way, change)
            # A call that has timed out may be noted during the next one.
            assert second.run(honest.all_noted_are, sent), (way, change)
    assert first.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
    assert second.run(honest.all_noted_are, sent)
    assert between.run(relay.changes) == len(FORTH) * len(relay.CHANGES)


@pytest.mark.parametrize("forth", [True, False], ids=["there", "back"])
def test_an_extra_stream_that_a_relay_alters_is_never_believed(
    scene: Scene, transport: str, forth: bool
) -> None:
    if transport == "socket":
        pytest.skip("its links have one connection")
    first, _, between = scene
    for number, change in enumerate(relay.CHANGES, 1):
        assert first.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
        while between.run(relay.changes) < number:  # a new link has its streams a moment later
            between.run(relay.arm, change, forth, True)
            first.run(honest.tensor_comes_back, "w1", TENSOR, timeout=0.9)
    assert first.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3


def test_a_call_that_a_relay_injects_does_not_run(scene: Scene, trap: Path, tmp_path: Path) -> None:
    first, second, between = scene
    requests = b"".join(make(str(trap)) for make in attacker.CVES.values())
    for way, forth in FORTH.items():
        gate = tmp_path / f"gate {way}"
        first.start(honest.try_call, "w1", honest.wait_for, str(gate))
        frames = requests if forth else attacker.hostile_answers(str(trap))
        assert between.run(relay.inject, frames, forth) >= 1
        gate.touch()
        got = first.result()
        assert got.error or got.value is True, way
        # w1 has read the injected bytes before the next frames of the same connection, w0 likewise.
        first.run(honest.try_call, "w1", operator.add, 1, 2)
        assert first.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
        assert second.run(honest.call_until_it_succeeds, "w0", operator.add, 1, 2) == 3
        assert not trap.exists(), way


def test_session_that_a_relay_recorded_can_not_be_played_again(encrypted: Scene) -> None:
    first, second, between = encrypted
    assert first.run(call, "w1", honest.note, b"once") == b"once"
    between.run(relay.play_again)
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(honest.noted) == 1
    leave_all(first, second)
