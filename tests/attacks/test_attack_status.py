"""Processes that ask about workers, and processes that are asked and are no workers.

All of it is on a host of its own, so that an impostor is not asked by anybody else's command.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import honest
import impostor
import pytest
import stranger
from click.testing import CliRunner
from crew import Crew, Member, assembled, call, join, leave_all
from keeping import Kept
from networks import enter, network
from patience import PATIENCE

from farcall.cli.commands import cli
from farcall.monitor import ask_all, asking

DESCRIPTORS = 256
CONNECTIONS = 64 + 16 + 32  # that have proven nothing, that ask, and whose handshake goes on
THREADS = 16 + 32 + 8
MEMORY = 128 << 20
MEMORY_OF_COMMAND = 1 << 30
COMMANDS = (["status"], ["status", "--json"], ["stacks"], ["doctor", "--no-measure"], ["metrics"])
SHORT = 0.5  # seconds, where it is to pass


class Host(NamedTuple):
    """A crew whose members are on one host of a network."""

    crew: Crew
    name: str

    def member(self, name: str, **environment: str) -> Member:
        made = self.crew.member(name, **environment)
        made.run(enter, self.name)
        return made

    def worker(self, name: str, transport: str) -> Member:
        variables = {"FARCALL_SECRET": honest.SECRET, "FARCALL_TRANSPORTS": transport}
        made = self.member(name, **variables)
        made.run(join, name, -1, None, self.crew.init_method, listen="127.0.0.1")
        return made


@pytest.fixture
def host(crew: Crew) -> Iterator[Host]:
    with network() as net:
        yield Host(crew, net.a)


# Steps.


class Said(NamedTuple):
    """The output of a command, and the most memory since `begin_to_measure`."""

    text: str
    memory: int


_resident: list[int] = []


def begin_to_measure() -> None:
    _resident[:] = [honest.reset_peak()]


def run_command(arguments: list[str]) -> Said:
    honest.reset_peak()
    done = CliRunner().invoke(cli, arguments)
    if done.exception is not None:  # which is what a command ends with that has failed
        raise RuntimeError(done.output) from done.exception
    return Said(done.output, honest.peak_bytes() - _resident[0])


def run_until(arguments: list[str], words: str) -> Said:
    """Run a command until these are in its output: a worker may be late."""
    while True:
        said = run_command(arguments)
        if re.search(words, said.text):
            return said


def ask_until(name: str) -> int:
    """Ask until a worker has answered; return how often that took."""
    for count in range(1, 10**9):
        if any(one.name == name for one in ask_all().reports):
            return count
    raise AssertionError


def ask_until_invented() -> tuple[list[str], list[str]]:
    """Return the names of workers, and why those that an impostor has told of do not answer."""
    asking.SPARE_SECONDS = 1.0
    while True:
        answer = ask_all()
        names = [one.name for one in answer.reports]
        if {"impostor", "w0"} <= {*names}:
            return names, [one.why for one in answer.silent]


def look(silence: float) -> list[tuple[str, str]]:
    answer = ask_all(timeout=silence)
    return [(one.name, one.host) for one in answer.reports]


# A process that is none of the workers, and is asked.


class Watched(NamedTuple):
    """A host with a worker "w0", and a process that asks."""

    host: Host
    asker: Member


@contextmanager
def watched_host(folder: Path) -> Iterator[Watched]:
    with assembled(f"{folder}/store") as crew, network() as net:
        host = Host(crew, net.a)
        host.worker("w0", "socket")
        asker = host.member("asker")
        asker.run(begin_to_measure)
        yield Watched(host, asker)


@pytest.fixture(scope="module")
def kept_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[Watched]]:
    kept = Kept(lambda: watched_host(tmp_path_factory.mktemp("watched")))
    yield kept
    kept.close()


@pytest.fixture
def watched(kept_host: Kept[Watched], request: pytest.FixtureRequest) -> Iterator[Watched]:
    with kept_host.lent(request.session) as watched:
        yield watched


@pytest.fixture
def fake(watched: Watched) -> Iterator[Member]:
    """Return a process on the watched host, which takes part in the one test only."""
    made = watched.host.member("impostor")
    yield made
    made.kill()


@pytest.mark.parametrize("kind", [*impostor.MANNERS, *impostor.REPORTS])
def test_impostor_is_named_and_neither_holds_up_nor_writes_to_the_asker(
    watched: Watched, fake: Member, kind: str
) -> None:
    name = impostor.name_like_a_workers()
    fake.start(impostor.listen, kind, name)
    asker = watched.asker
    asker.run(impostor.wait_for, name)
    words = WORDS[kind]
    timeout = SHORT if words == LATE else PATIENCE
    for command in COMMANDS:
        said = asker.run(run_until, [*command, "--timeout", str(timeout)], r"\bw0\b")
        assert [line for line in said.text.split("\n") if not line.isprintable()] == []
        assert said.memory < MEMORY_OF_COMMAND
        if command == ["status"]:
            [row] = [row for row in said.text.split("\n") if f" {fake.process.pid} " in row]
            assert re.search(words, row)
        if command == ["status", "--json"]:
            json.loads(said.text)
            assert said.text.isascii()


LATE = r"does not answer within 0.5 s"
JUNK = r"no report of a worker"
WORDS = {
    "closes": r"closed|broken|reset|Broken",
    "silent": LATE,
    "full": LATE,
    "garbage": r"not farcall",
    "announces": r"a message of \d+ bytes",
    "says hello byte by byte": LATE,
    "goes on for long": LATE,
    "no report": JUNK,
    "no text": JUNK,
    "nested": JUNK,
    "no number": JUNK,
    "no number of descriptors": "impostor",
    "endless age": JUNK,
    "no name": JUNK,
    "escapes": "impostor",
    "ring": "impostor",
    "many texts": "more values",
    "many keys": "more values",
}


def test_workers_that_an_impostor_invents_are_not_all_dialled(host: Host) -> None:
    host.worker("w0", "socket")
    port = host.member("quiet").run(impostor.accept_nothing)
    fake = host.member("impostor")
    fake.start(impostor.listen, f"invents {port}", impostor.name_like_a_workers())
    _, why = host.member("asker", FARCALL_SECRET=honest.SECRET).run(ask_until_invented)
    assert len(why) == impostor.INVENTED
    assert all(one.startswith("it does not answer") for one in why)


def test_another_user_can_not_speak_for_a_worker(host: Host) -> None:
    """Claim a socket by a line of /proc/net/unix: the second line of another socket's name."""
    victim = host.worker("w0", "socket")
    (url,) = [url for url in victim.run(honest.urls) if url.startswith("unix")]
    (socket,) = re.findall(
        rf"(\d+) {re.escape(url.removeprefix('unix:'))}$",
        victim.run(Path.read_text, Path("/proc/net/unix")),
        re.MULTILINE,
    )
    other = host.member("stranger")
    if other.run(stranger.become_nobody) != stranger.NOBODY:
        pytest.skip("only root becomes another user")
    asker = host.member("asker")
    for kind in ("escapes", "full"):
        forged = impostor.name_like_a_workers()
        fake = host.member("fake")
        fake.run(stranger.become_nobody)
        fake.start(impostor.listen, kind, forged)
        asker.run(impostor.wait_for, forged)
        line = f"\n0: 00000002 00000000 00010000 0001 01 {socket} @{forged}"
        forger = host.member("forger")
        forger.run(stranger.become_nobody)
        forger.run(stranger.take_name, line)
    assert [name for name, _ in asker.run(look, PATIENCE)] == ["w0"]


def test_name_of_a_worker_that_died_is_of_no_use_to_another_user(host: Host) -> None:
    first, second = host.worker("w0", "socket"), host.worker("w1", "socket")
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    (url,) = [url for url in first.run(honest.urls) if url.startswith("unix")]
    first.kill()
    squatter = host.member("squatter")
    if squatter.run(stranger.become_nobody) != stranger.NOBODY:
        pytest.skip("only root becomes another user")
    name = url.partition("@")[2]
    squatter.start(impostor.listen, "silent", name)
    second.run(impostor.wait_for, name)
    assert "PeerLost" in second.run(honest.try_call, "w0", operator.add, 1, 2).error
    again = host.worker("w0", "socket")
    assert second.run(honest.call_until_it_succeeds, "w0", operator.add, 1, 2) == 3
    assert sorted(name for name, _ in host.member("asker").run(look, PATIENCE)) == ["w0", "w1"]
    leave_all(again, second)


# A process that asks, of the same user and without the secret.


@pytest.mark.parametrize("kind", impostor.QUESTIONS)
def test_a_process_that_asks_without_end_keeps_no_other_out(
    host: Host, transport: str, tmp_path: Path, kind: str
) -> None:
    victim = host.worker("w0", transport)
    first = host.worker("w1", transport)
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    victim.run(honest.limit_descriptors, DESCRIPTORS)
    victim.run(honest.count_lines)
    descriptors = victim.run(honest.count_descriptors)
    threads = victim.run(honest.count_threads)
    memory = victim.run(honest.reset_peak)
    (url,) = [url for url in victim.run(honest.urls) if url.startswith("unix")]
    begun, stop = tmp_path / "begun", tmp_path / "stop"
    flooder = host.member("flooder")
    flooder.start(impostor.ask, url, kind, str(begun), str(stop))
    honest.wait_for(str(begun))
    second = host.worker("w2", transport)
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    assert host.member("asker").run(ask_until, "w0") > 0
    assert victim.run(honest.open_files, 32) == 32
    assert victim.run(honest.count_descriptors) <= descriptors + CONNECTIONS
    assert victim.run(honest.count_threads) <= threads + THREADS
    assert victim.run(honest.peak_bytes) - memory < MEMORY
    stop.touch()
    assert flooder.result() >= 100
    said = victim.run(honest.lines)
    assert len(said) <= 4, said
    leave_all(victim, first, second)


def test_a_process_that_asks_byte_by_byte_is_cut_off(
    host: Host, transport: str, tmp_path: Path
) -> None:
    victim = host.worker("w0", transport)
    (url,) = [url for url in victim.run(honest.urls) if url.startswith("unix")]
    begun = tmp_path / "begun"
    slow = host.member("slow")
    slow.start(impostor.trickle, url, 40, str(begun))
    honest.wait_for(str(begun))
    second = host.worker("w1", transport)
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    assert host.member("asker").run(ask_until, "w0") > 0
    assert slow.result() > 0
    leave_all(victim, second)
