"""Attackers that control the store and the path read, change, mislead and run nothing."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import attacker
import honest
import pytest
import relay
from certificates import Authority
from crew import Crew, join, leave_all
from hostile_store import Deceive, HostileStore, at_file
from networks import enter, network
from patience import PATIENCE

from farcall import rpc
from farcall.errors import FarcallError

PORTS = (29551, 29552)  # of w1 and w2, which share a host; w0 listens at the first one on the other
MARKER = b"only for the worker that is called"


# Steps.

_stores: list[HostileStore] = []


def join_deceived(listen: str, file: str, swapped: dict[str, str], options: dict[str, Any]) -> str:
    """Join as w0 by a store in the attacker's hands; return the error if that fails."""
    _stores[:] = [at_file(file, Deceive(file, ("w1", "w2"), swapped))]
    made = rpc.RpcBackendOptions(store=_stores[0], rpc_timeout=PATIENCE, listen=listen, **options)
    try:
        rpc.init_rpc("w0", rank=0, rpc_backend_options=made)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lies() -> int:
    """Return how often the store has said something else than it holds."""
    return _stores[0].rewritten


def own_name() -> str:
    return rpc.get_worker_info().name


def answer(value: bytes) -> tuple[str, bytes]:
    """Keep a value; return it, and the name of the worker that got it."""
    return own_name(), honest.note(value)


@pytest.mark.parametrize("credential", ["secret", "certificates"])
def test_store_and_path_in_one_hand_mislead_no_call(
    crew: Crew, transport: str, trap: Path, tmp_path: Path, credential: str
) -> None:
    options: list[dict[str, Any]] = [{"secret": honest.SECRET}] * 3
    if credential == "certificates":
        authority = Authority(tmp_path)
        options = [{"tls": authority.issue(f"w{rank}").config()} for rank in range(3)]
    file = crew.init_method.removeprefix("file://")
    with network() as net:
        relay.intercept(net, [net.a, net.b])
        relays = [crew.member(f"relay{port}") for port in PORTS]
        for between, port in zip(relays, PORTS, strict=True):
            between.run(enter, net.router)
            between.run(relay.begin, port)
        first, *others = (
            crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport) for rank in range(3)
        )
        for member, host in ((first, net.a), *((other, net.b) for other in others)):
            member.run(enter, host)
            member.run(honest.look_again_soon)
        for rank, (member, port) in enumerate(zip(others, PORTS, strict=True), 1):
            listen = f"{net.addresses[net.b]}:{port}"
            member.run(
                join, member.name, rank, None, crew.init_method, listen=listen, **options[rank]
            )
        facts = [[*m.run(honest.urls), str(m.run(attacker.me)[2])] for m in others]
        swapped = dict([*zip(*facts, strict=True), *zip(*reversed(facts), strict=True)])
        listen = f"{net.addresses[net.a]}:{PORTS[0]}"
        assert first.run(join_deceived, listen, file, swapped, options[0]) == ""

        hostile = b"".join(make(str(trap)) for make in attacker.CVES.values())
        answers = attacker.hostile_answers(str(trap))
        sent: dict[str, list[bytes]] = {other.name: [] for other in others}
        for change in relay.CHANGES:
            for forth in (True, False):
                for other, between in zip(others, relays, strict=True):
                    between.run(relay.arm, change, forth)
                    value = MARKER + secrets.token_bytes(2000)
                    sent[other.name].append(value)
                    got = first.run(honest.try_call, other.name, answer, value, timeout=0.9)
                    assert got.error or got.value == (other.name, value), (change, forth)
                    # A call that has timed out may be noted during a later one.
                    assert other.run(honest.all_noted_are, sent[other.name]), (change, forth)
                    between.run(relay.inject, hostile if forth else answers, forth)
        for between in relays:
            between.run(relay.play_again)
        for other in others:
            # However long it takes: the truth is among what the store says.
            assert first.run(honest.call_until_it_succeeds, other.name, own_name) == other.name
            assert other.run(honest.all_noted_are, sent[other.name])
        for between in relays:
            found, size = between.run(relay.has_seen, MARKER)
            assert size > len(MARKER)
            assert not found
            assert between.run(relay.changes) > 0
        assert first.run(lies) > 0
        assert not trap.exists()
        leave_all(first, *others)
