"""The store of a group whose workers come and go is stopped, killed and restarted empty.

Meanwhile workers that have links call each other all the time, and others join, die and join again.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from crew import Crew, Member, assembled, join, leave_all
from report import Report, Settings
from steps import attempt, call_until_value
from torch.distributed import TCPStore

from farcall import rpc

OLD = ("a", "b", "c")
TIMEOUT = 2.0  # seconds, of the calls between linked workers
SLOW = 1.0  # a call between linked workers that takes longer has waited for the store
ALLOWED = 1.0
STOPPED = DEAD = 8.0  # seconds
MEETING = 35.0  # seconds by which old members and newcomers find each other

_kept: list[Any] = []
_steady: list[threading.Thread] = []
_ended: list[tuple[float, str]] = []
_resting = threading.Event()


def host(port: int) -> int:
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    _kept.append(store)
    return int(store.port)


def one() -> int:
    return 1


def call_steadily(others: list[str]) -> None:
    """Call each of these again and again, from a thread."""

    def run() -> None:
        while not _resting.is_set():
            for other in others:
                began = time.monotonic()
                try:
                    kind = "value" if rpc.rpc_sync(other, one, timeout=TIMEOUT) == 1 else "wrong"
                except Exception as error:
                    kind = f"{type(error).__name__}: {error}"
                _ended.append((time.monotonic() - began, kind))
            time.sleep(0.002)

    _steady.append(threading.Thread(target=run, daemon=True))
    _steady[0].start()


def rest() -> tuple[int, float, list[str]]:
    """Calls, seconds of the longest, and those that failed."""
    _resting.set()
    _steady[0].join()
    failures = [kind for _, kind in _ended if kind != "value"]
    return len(_ended), max(took for took, _ in _ended), failures


class Group:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.port = 0
        self.start_store()

    def start_store(self) -> None:
        self.store = self._crew.member("store")
        self.port = self.store.run(host, self.port)

    def begin_to_join(self, name: str) -> Member:
        member = self._crew.member(name)
        member.start(join, name, -1, None, f"tcp://127.0.0.1:{self.port}")
        return member

    def join(self, name: str) -> Member:
        member = self.begin_to_join(name)
        member.result()
        return member


def trial(report: Report, settings: Settings) -> None:
    with assembled(f"{settings.folder}/stores") as crew:
        group = Group(crew)
        old = {name: group.join(name) for name in OLD}
        guest = group.join("guest")
        for name, member in old.items():
            for other in (*(each for each in OLD if each != name), "guest"):
                assert member.run(call_until_value, other, MEETING) is not None
        for name, member in old.items():
            member.run(call_steadily, [each for each in OLD if each != name])
        time.sleep(1.0)

        group.store.stop()
        guest.kill()
        again = group.begin_to_join("guest")  # waits for the store
        end = time.monotonic() + STOPPED
        _deadlines(report, old["a"], "store stopped", end)
        group.store.signal(signal.SIGCONT)
        _joined(report, again, "store goes on: the join that waited, of a name that died")
        _meet(report, "store goes on", old, {"guest": again})

        group.store.kill()
        again.kill()
        _deadlines(report, old["b"], "store killed", time.monotonic() + DEAD)
        group.start_store()
        new = {name: group.begin_to_join(name) for name in ("guest", "newcomer")}
        for name, member in new.items():
            _joined(report, member, f"store restarted empty: {name} joins")
        _meet(report, "store restarted empty", old, new)

        calls, longest, failures = 0, 0.0, []
        for member in old.values():
            result = member.run(rest)
            calls, longest = calls + result[0], max(longest, result[1])
            failures += result[2]
        report.demand("calls over links neither fail nor wait", f"{calls} calls, the longest "
                      f"{longest:.3f} s, failed {failures[:3]}",
                      not failures and longest < SLOW)  # fmt: skip
        leave_all(*old.values(), *new.values())


def _deadlines(report: Report, member: Member, when: str, end: float) -> None:
    """Calls that need the store, with several timeouts, until `end`."""
    kinds: set[str] = set()
    late, count = 0.0, 0
    while time.monotonic() < end:
        for name in ("stranger", "guest"):
            for timeout in (0.1, 0.5, 2.0):
                outcome = member.run(attempt, name, timeout)
                kinds.add(outcome.kind)
                late, count = max(late, outcome.took - timeout), count + 1
    report.demand(f"{when}: an outcome by the deadline + {ALLOWED:.0f} s",
                  f"{count} calls {sorted(kinds)}, at most {late:+.2f} s",
                  late <= ALLOWED and "value" not in kinds)  # fmt: skip


def _joined(report: Report, member: Member, what: str) -> None:
    began = time.monotonic()
    try:
        member.result()
    except Exception as error:
        report.demand(what, f"{type(error).__name__}: {error}", False)
    else:
        took = time.monotonic() - began
        report.demand(what, f"after {took:.1f} s", took <= MEETING)


def _meet(report: Report, when: str, old: dict[str, Member], new: dict[str, Member]) -> None:
    """Let all old ones call all new ones, and the other way round."""
    took = []
    for ours, theirs in ((old, new), (new, old)):
        for member in ours.values():
            took += [member.run(call_until_value, other, MEETING) for other in theirs]
    report.demand(f"{when}: old members and newcomers find each other",
                  f"{[None if each is None else round(each, 2) for each in took]} s",
                  None not in took)  # fmt: skip
