"""A host goes dark, with and without links to it, and comes back. `dead_host_timeout` is 30 s.

Six pairs of workers, one worker of each pair per host, see the same cut.
"""

from __future__ import annotations

import time

import pytest
from crew import Crew, Member, assembled, join, leave, leave_all
from known_secrets import SECRET
from networks import Network, network
from networks import enter as enter_host
from report import Report, Settings
from steps import (
    ask_without_waiting,
    call_until_value,
    listen,
    load_until_error,
    wait_for_loss,
)

BOUND = 35.0  # seconds from the cut to PeerLost
LEAVING = 40.0  # seconds for a graceful shutdown: 30, and one attempt at an address takes 7.5
AT_ONCE = 0.05  # seconds for a call that does not wait
PATIENCE = 90.0
LINKED = ("idle", "loaded", "asked", "leaving")
STAYING = ("idle", "loaded", "asked", "unlinked")
UNLINKED = ("unlinked", "unlinked, leaving")
ENVIRONMENT = {"FARCALL_SECRET": SECRET}  # workers of several hosts need one

Pair = tuple[Member, Member]


def make_pairs(crew: Crew, net: Network, folder: str) -> dict[str, Pair]:
    pairs = {}
    for label in LINKED + UNLINKED:
        pair = (crew.member("near", **ENVIRONMENT), crew.member("far", **ENVIRONMENT))
        for rank, (member, host) in enumerate(zip(pair, (net.a, net.b), strict=True)):
            member.run(enter_host, host)
            member.start(join, member.name, rank, 2, f"file://{folder}/dark {label}")
        pairs[label] = pair
    for label, pair in pairs.items():
        for member in pair:
            member.result()
            member.run(listen)
        if label in LINKED:
            assert pair[0].run(call_until_value, "far", PATIENCE) is not None
    return pairs


def trial(report: Report, settings: Settings) -> None:
    try:
        with network() as net, assembled(f"{settings.folder}/dark") as crew:
            pairs = make_pairs(crew, net, str(settings.folder))
            near = {label: pair[0] for label, pair in pairs.items()}
            near["loaded"].start(load_until_error, "far", 4)
            time.sleep(1.0)
            net.cut()
            _in_the_dark(report, pairs, time.monotonic())
            net.join()
            _in_the_light(report, [pairs[label] for label in STAYING])
    except pytest.skip.Exception as reason:
        report.skip("a host that goes dark", str(reason))


def _in_the_dark(report: Report, pairs: dict[str, Pair], cut: float) -> None:
    near = {label: pair[0] for label, pair in pairs.items()}
    for member in pairs["idle"]:
        member.start(wait_for_loss, PATIENCE)
    for label in ("asked", "unlinked"):
        near[label].start(ask_without_waiting, "far")
    for label in ("leaving", "unlinked, leaving"):
        for member in pairs[label]:
            member.start(leave)

    lost = [member.result() for member in pairs["idle"]]
    took = [round(each[0] - cut, 1) if each else None for each in lost]
    report.demand(f"idle link: either side PeerLost within {BOUND:.0f} s", f"{took} s",
                  all(each is not None and each <= BOUND for each in took))  # fmt: skip

    kind, ended = near["loaded"].result()
    report.demand(f"link under load: PeerLost within {BOUND:.0f} s", f"{kind}, {ended - cut:.1f} s",
                  kind == "PeerLost" and ended - cut <= BOUND)  # fmt: skip

    for label in ("asked", "unlinked"):
        future, remote, kinds, ended = near[label].result()
        report.demand(
            f"{label}: rpc_async, remote back within {AT_ONCE * 1000:.0f} ms",
            f"{future * 1000:.1f} and {remote * 1000:.1f} ms",
            max(future, remote) <= AT_ONCE,
        )
        report.demand(f"{label}: lost within {BOUND:.0f} s", f"{kinds}, {ended - cut:.1f} s",
                      kinds == "PeerLost+OwnerDied" and ended - cut <= BOUND)  # fmt: skip

    for label in ("leaving", "unlinked, leaving"):
        took = [round(member.result(), 1) for member in pairs[label]]
        report.demand(f"{label}: graceful shutdown within {LEAVING:.0f} s", f"{took} s",
                      max(took) <= LEAVING)  # fmt: skip


def _in_the_light(report: Report, pairs: list[Pair]) -> None:
    again = []
    for pair in pairs:
        for member, other in zip(pair, reversed(pair), strict=True):
            member.start(call_until_value, other.name, PATIENCE)
    for pair in pairs:
        again += [member.result() for member in pair]
    report.demand(f"back again: calls succeed within {BOUND:.0f} s",
                  f"{[None if each is None else round(each, 1) for each in again]} s",
                  all(each is not None and each <= BOUND for each in again))  # fmt: skip
    began = time.monotonic()
    for pair in pairs:
        leave_all(*pair)
    took = time.monotonic() - began
    report.demand("back again: graceful shutdown of all", f"{took:.1f} s", took <= BOUND)
