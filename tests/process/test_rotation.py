"""Certificates, keys and authorities are replaced while workers call each other again and again.

By the commands of docs/security.md. Links are over TCP, with several streams.
"""

from __future__ import annotations

import logging
import operator
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from certificates import Authority, Issued, run_block
from crew import Crew, Member, call, join, leave_all
from load import prepare, remember, settle
from patience import PATIENCE

from farcall import rpc
from farcall.errors import AuthenticationFailed

NAMES = ("w0", "w1", "w2")
ROUNDS = 2
PAUSE = 0.2  # seconds between the calls of a thread; six threads without one would fill all cores
SIZE = 1 << 18  # floats that go over several streams

_stop = threading.Event()
_callers: list[threading.Thread] = []
_ends: Counter[str] = Counter()
_lines: list[str] = []
_logged = threading.Condition()


# Steps.


def call_without_end(peers: tuple[str, ...]) -> None:
    """Call each peer from a thread, from now on until `stop_calling`."""
    handler = logging.Handler(logging.INFO)
    handler.emit = _note  # type: ignore[method-assign]
    logging.getLogger("farcall").addHandler(handler)
    logging.getLogger("farcall").setLevel(logging.INFO)
    for peer in peers:
        _callers.append(threading.Thread(target=_repeat, args=(peer,), daemon=True))
        _callers[-1].start()


def _note(record: logging.LogRecord) -> None:
    with _logged:
        _lines.append(record.getMessage())
        _logged.notify_all()


def _repeat(peer: str) -> None:
    while not _stop.wait(PAUSE):
        try:
            both_kinds(peer)
        except BaseException as error:
            _ends[f"{peer}: {type(error).__name__}: {error}"] += 1
            return
        _ends["value"] += 1


def _small(peer: str) -> None:
    for number in range(5):
        assert rpc.rpc_sync(peer, operator.add, args=(number, 1)) == number + 1


def _large(peer: str) -> None:
    answer = rpc.rpc_sync(peer, torch.add, args=(torch.ones(SIZE), 1))
    assert bool((answer == 2).all())


def stop_calling() -> Counter[str]:
    """Return how the calls ended."""
    _stop.set()
    for thread in _callers:
        thread.join(PATIENCE)
    return _ends


def logs(text: str) -> bool:
    """Wait for a line with this text; return whether it came."""
    with _logged:
        return _logged.wait_for(lambda: any(text in line for line in _lines), PATIENCE)


def found(peer: str) -> bool:
    """Wait until this worker finds a peer, which may have yet to sign with its new certificate."""
    return [member.name for member in rpc.wait_for(peer, timeout=PATIENCE)] == [peer]


def both_kinds(peer: str) -> bool:
    _small(peer)
    _large(peer)
    return True


# Files, as an administrator replaces them.


class Files(NamedTuple):
    """The files of one worker, of which other ones take the place."""

    worker: str
    folder: Path

    @property
    def config(self) -> rpc.TlsConfig:
        paths = (self.folder / name for name in ("w.crt", "w.key", "ca.crt"))
        return rpc.TlsConfig(*map(str, paths), names=True)

    def put(self, name: str, data: bytes) -> None:
        """Write into the file that is there, as `cp` does."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(data)

    def half(self, name: str, data: bytes) -> None:
        self.put(name, data[: len(data) // 2])

    def move(self, name: str, data: bytes) -> None:
        """Put another file in the place of that name, as `mv` does."""
        self.put(f"{name}.new", data)
        (self.folder / f"{name}.new").rename(self.folder / name)


def files_of(folder: Path, issued: Issued, worker: str) -> Files:
    files = Files(worker, folder / f"files of {worker}")
    files.folder.mkdir()
    files.put("w.key", issued.key.read_bytes())
    files.put("w.crt", issued.cert.read_bytes())
    files.put("ca.crt", issued.ca.read_bytes())
    return files


class Group:
    """Workers that come and go, and call each other."""

    def __init__(self, crew: Crew, transport: str, folder: Path) -> None:
        self._crew = crew
        self._folder = folder
        self._transport = transport
        self._count = 0
        self.members: list[Member] = []

    def member(self, name: str) -> Member:
        member = self._crew.member(name, FARCALL_TRANSPORTS=self._transport)
        member.run(prepare)
        return member

    def start(self, member: Member, rank: int, tls: rpc.TlsConfig) -> None:
        options = {"listen": "127.0.0.1", "paths": ("tcp",), "tcp_streams": 4}
        member.run(join, member.name, rank, None, self._crew.init_method, tls=tls, **options)

    def visit(self, authority: Authority, ca: bytes | None = None) -> None:
        """Let a newcomer and all workers make links to each other, and let it leave."""
        self._count += 1
        name = f"n{self._count}"
        files = files_of(self._folder, authority.issue(name), name)
        if ca is not None:
            files.put("ca.crt", ca)
        newcomer = self.member(name)
        self.start(newcomer, 100 + self._count, files.config)
        for member in self.members:
            assert newcomer.run(found, member.name)
            assert newcomer.run(both_kinds, member.name)
            assert member.run(both_kinds, name)
        newcomer.run(rpc.shutdown, graceful=False)
        newcomer.kill()


@pytest.fixture(params=["native", "socket"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("farcall._native")
    return str(request.param)


def test_certificates_are_replaced_under_load_and_no_call_fails(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    old = Authority(tmp_path, "old")
    group = Group(crew, transport, tmp_path)
    files = [files_of(tmp_path, old.issue(name), name) for name in NAMES]
    for rank, one in enumerate(files):
        member = group.member(one.worker)
        group.start(member, rank, one.config)
        group.members.append(member)
    for member in group.members:
        for other in NAMES:
            member.run(both_kinds, other)
    for member in group.members:
        others = tuple(name for name in NAMES if name != member.name)
        member.run(call_without_end, others)
        member.run(remember)
    group.visit(old)
    for number in range(ROUNDS):
        old = replaced(group, files, old, number, tmp_path)
    refused_by_name(group, old, tmp_path)
    for member in group.members:
        assert member.run(settle) == {}
    for member in group.members:
        ends = member.run(stop_calling)
        assert ends.pop("value") > 0
        assert not ends
    leave_all(*group.members)


def replaced(
    group: Group, files: list[Files], old: Authority, number: int, folder: Path
) -> Authority:
    """Replace everything that the workers have; return their new authority."""
    shutil.rmtree(folder / "new", ignore_errors=True)
    new = Authority(folder, "new")
    run_block("both", folder)
    both, newest = (folder / "ca.crt").read_bytes(), (folder / "new" / "ca.crt").read_bytes()
    put = Files.move if number % 2 else Files.put
    for one in files:
        one.half("ca.crt", both)
        put(one, "ca.crt", both)
    group.visit(old)  # with a certificate that is bad, a new authority would not be read either
    put_an_expired_one(files[0], old.issue(files[0].worker, days=-1))
    group.visit(new, both)  # the former certificate goes on
    for one in files:
        issued = new.issue(one.worker)
        one.half("w.key", issued.key.read_bytes())
        put(one, "w.key", issued.key.read_bytes())
        one.half("w.crt", issued.cert.read_bytes())
        if one is files[1]:
            group.visit(old, both)
        put(one, "w.crt", issued.cert.read_bytes())
    for one in files:
        one.half("ca.crt", newest)
        put(one, "ca.crt", newest)
    group.visit(new)  # it knows the new authority alone
    shutil.rmtree(folder / "old")
    (folder / "new").rename(folder / "old")
    return Authority.in_folder(folder / "old")


def put_an_expired_one(files: Files, issued: Issued) -> None:
    files.put("w.key", issued.key.read_bytes())
    files.put("w.crt", issued.cert.read_bytes())


def refused_by_name(group: Group, authority: Authority, folder: Path) -> None:
    """Start a worker with a certificate of another authority, which knows ours: it gets no link."""
    gone = Authority(folder, "gone")
    files = files_of(folder, gone.issue("late"), "late")
    ours, theirs = (folder / "old" / "ca.crt").read_bytes(), files.folder / "ca.crt"
    files.put("ca.crt", theirs.read_bytes() + ours)
    late = group.member("late")
    group.start(late, 99, files.config)
    late.start(call, "w0", operator.add, 1, 2)
    error = late.fails()
    assert type(error) is AuthenticationFailed
    assert f"{files.folder}/w.crt is not of the peer's CA" in str(error)
    for text in ("is not of our CA", "going on with the former certificate", "has expired on"):
        assert group.members[0].run(logs, text), text
