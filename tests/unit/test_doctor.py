"""The findings of `farcall doctor` on a machine, on workers and on paths."""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from farcall.cli.doctor import doctor as command
from farcall.monitor import Finding, Pair, checkup, doctor, installation, machine
from farcall.monitor.asking import AskResult, SilentWorker
from farcall.monitor.checkup import CHECKS, SKEW, of_group, of_pairs
from farcall.monitor.findings import LEVELS, size
from farcall.runtime.inspection.reports import MemberReport, WorkerReport

VARIABLES = (
    *("FARCALL_SECRET", "FARCALL_SECRET_FILE", "FARCALL_INSECURE", "FARCALL_ENCRYPT"),
    *("FARCALL_TLS_CERT", "FARCALL_TLS_KEY", "FARCALL_TLS_CA", "FARCALL_TRANSPORTS"),
    *("MASTER_ADDR", "MASTER_PORT", "FARCALL_LISTEN"),
)
SECRET = secrets.token_urlsafe(32)


@pytest.fixture(autouse=True)
def no_workers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the workers of other tests, which are this user's on this machine, too."""
    monkeypatch.setattr("farcall.monitor.asking.workers_here", lambda: [])


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def of(check: Callable[[], Iterator[Finding]], subject: str) -> Finding:
    """Return the worst finding about a subject."""
    found = [one for one in check() if one.subject == subject]
    return min(found, key=lambda one: LEVELS.index(one.level))


def test_a_good_machine_is_fine() -> None:
    found = [one for check in CHECKS for one in check()]
    assert {one.subject for one in found} >= {
        *("versions", "transport", "secret", "name resolution", "ports", "descriptors"),
        *("threads", "memlock", "memory", "shared memory", "clock"),
    }
    assert not [one for one in found if one.level == "wrong"]
    assert all(one.cure for one in found if one.level == "look" and one.subject != "shared memory")


def test_the_secret_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("FARCALL_SECRET", SECRET)
    by_variable = of(installation.secret, "secret")
    monkeypatch.delenv("FARCALL_SECRET")
    monkeypatch.setenv("FARCALL_SECRET_FILE", str(path))
    by_file = of(installation.secret, "secret")
    assert by_variable.text.startswith("of FARCALL_SECRET, ")
    assert f"FARCALL_SECRET_FILE={path}, mode 0600" in by_file.text
    for found in (by_variable, by_file):
        assert found.level == "fine"
        assert "bits" in found.text
        assert SECRET not in str(found)


def test_a_secret_that_is_no_good_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_SECRET", "correct horse battery")
    found = of(installation.secret, "secret")
    assert found.level == "wrong"
    assert "looks like a password" in found.text
    assert "horse" not in str(found)
    monkeypatch.delenv("FARCALL_SECRET")
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    monkeypatch.setenv("FARCALL_SECRET_FILE", str(path))
    assert "may be read or changed by others (mode 0644)" in of(installation.secret, "secret").text


def test_looking_makes_no_secret(tmp_path: Path) -> None:
    found = of(installation.secret, "secret")
    assert found.text.startswith("this user's own")
    assert not (tmp_path / "state").exists()


def test_no_secret_at_all_is_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_INSECURE", "1")
    assert of(installation.secret, "secret").level == "look"


def test_half_of_the_certificates_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TLS_CERT", "w0.pem")
    assert "set all of them, or none" in of(installation.secret, "certificates").text


def test_a_missing_native_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, installation.NATIVE_MODULE, None)
    found = of(installation.versions, "transport")
    assert found.level == "look"
    assert "C++20 compiler" in found.cure


def test_a_name_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no..name")
    found = of(machine.names, "name resolution")
    assert (found.level, "'no..name'" in found.text) == ("wrong", True)
    assert "/etc/hosts" in found.cure


def test_where_workers_are_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert of(machine.ports, "store").level == "wrong"  # no port
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = of(machine.ports, "store")
    assert (found.level, f"127.0.0.1:{port}" in found.text) == ("look", True)


def test_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 524288))
    assert of(machine.limits, "descriptors") == Finding(
        "look", "descriptors", "a process may open 256 files; a link takes several",
        "ulimit -n 524288",
    )  # fmt: skip
    assert of(machine.limits, "threads").level == "look"
    assert of(machine.limits, "address space").level == "look"


def test_a_container_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/cgroup": "0::/box\n", "/sys/fs/cgroup/box/memory.max": f"{1 << 30}\n",
             "/sys/fs/cgroup/box/memory.current": f"{1000 << 20}\n"}  # fmt: skip
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    found = of(machine.memory, "memory")
    assert found.text.startswith("this container uses 1000 MiB of the 1 GiB that it may have")
    assert found.level == "look"


def test_a_small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        f_frsize, f_blocks, f_bavail = 4096, 16384, 16384

    monkeypatch.setattr(os, "statvfs", lambda path: Found)
    found = of(machine.memory, "shared memory")
    assert found.text.startswith("/dev/shm has 64 MiB of 64 MiB free")
    assert "--shm-size" in found.cure


def test_a_clock_that_was_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert of(machine.clock, "clock").level == "wrong"


NOW = 1_800_000_000.0


def worker(name: str, **more: Any) -> WorkerReport:
    found = WorkerReport(name, 0, 1, "box", 1, "farcall 1", 1.0, 1, (1, 100))
    return msgspec.structs.replace(found, **more)


def member(name: str, **more: Any) -> MemberReport:
    found = MemberReport(name, 1, 2, "box", 2, (), "tcp box:1", 0, 0, True, "")
    return msgspec.structs.replace(found, **more)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([worker("w0"), worker("w1", versions="farcall 2")], "w0: farcall 1; w1: farcall 2"),
        ([worker("w0", transport="socket")], "w0 runs without the native transport"),
        ([worker("w0", clock=NOW - 2 * SKEW)], "the clock of w0 on box is -4.0 s off"),
        ([worker("w0", clock=NOW + 60 + 2 * SKEW)], "the clock of w0 on box is +4.0 s off"),
        ([worker("w0", members=[member("w1", losses=2)])], "w0 has lost w1 2 times"),
    ],
)
def test_the_lines_about_workers(reports: list[WorkerReport], said: str) -> None:
    [found] = [
        one for one in of_group(AskResult(reports, []), NOW, NOW + 60) if one.level == "look"
    ]
    assert said in found.text


def test_a_worker_that_answered_late_has_no_wrong_clock() -> None:
    answer = AskResult([worker("w0", clock=NOW + 30)], [])
    assert not [one for one in of_group(answer, NOW, NOW + 60) if one.subject == "clock"]


@pytest.mark.parametrize(
    ("path", "level", "said"),
    [
        (member("w1", drawback="an option"), "look", "w0 -> w1: over tcp: an option"),
        (member("w1", unreached="it is late"), "wrong", "w0 -> w1: it is late"),
        (member("w1", latency=0.5), "look", "a call that does nothing takes 500 ms"),
        (member("w1", host="far", protection="none"), "look", "nothing encrypts"),
    ],
)
def test_the_lines_about_a_path(path: MemberReport, level: str, said: str) -> None:
    [found] = of_pairs([Pair("w0", path)], AskResult([worker("w0")], []))
    assert found.level == level
    assert said in found.text


def test_a_path_to_another_host_is_fine() -> None:
    path = member("w1", host="far", drawback="it runs on another host", protection="encrypted")
    assert list(of_pairs([Pair("w0", path)], AskResult([worker("w0")], []))) == []


def test_important_lines_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SECRET", "short")
    monkeypatch.setenv("FARCALL_ENCRYPT", "0")
    levels = [LEVELS.index(one.level) for one in doctor(measure=False).findings]
    assert levels == sorted(levels)
    assert levels[0] == 0


def test_a_worker_with_another_secret_does_not_hang() -> None:
    refusing = SilentWorker(0, "w1", "check FARCALL_SECRET on both workers", "")
    answer = AskResult([worker("w0", members=[member("w1")])], [refusing])
    assert answer.of_group(1) == answer
    [found] = [one for one in of_group(answer, NOW, NOW) if one.level == "look"]
    assert found.text == f"w1 says nothing of itself: {refusing.why}"


def test_sizes_in_words() -> None:
    assert [size(1), size(64 << 20), size(3 << 29)] == ["1 bytes", "64 MiB", "1.5 GiB"]


PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def shown_on_the_page() -> list[str]:
    """Return the lines of the first example, as `farcall doctor` prints them."""
    return re.findall(r"^(?:wrong|look |fine )  .*$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_the_page_explains_each_subject_that_it_shows_and_that_there_is() -> None:
    table = PAGE.read_text("utf-8").partition("## One path")[0]
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", table, re.MULTILINE)
    explained = {subject for row in rows for subject in re.findall(r"`([^`]+)`", row)}
    given = {one.subject for check in CHECKS for one in check()}
    shown = {line[7:].partition(":")[0] for line in shown_on_the_page()}
    assert given | shown <= explained
    source = "".join(
        Path(module.__file__ or "").read_text("utf-8")
        for module in (checkup, installation, machine)
    )
    assert {subject for subject in explained if f'"{subject}"' not in source} == set()


def test_the_example_has_lines_as_the_command_prints_them() -> None:
    """Compare all but numbers, names and paths of this machine."""
    words = {line[:7] + line[7:].partition(":")[0]: line for line in shown_on_the_page()}
    done = CliRunner().invoke(command, ["--no-measure", "--timeout", "0.5"])
    assert done.exit_code == 0, done.output
    for line in done.output.splitlines():
        like = words.get(line[:7] + line[7:].partition(":")[0])
        if like is not None and "workers" not in like:
            assert re.findall(r"[a-z]{4,}", like)[:3] == re.findall(r"[a-z]{4,}", line)[:3]


def test_json_has_all_that_was_found() -> None:
    done = CliRunner().invoke(command, ["--no-measure", "--timeout", "0.5", "--json"])
    found = json.loads(done.output)
    assert found.keys() == {"findings", "pairs", "unmeasured"}
    assert found["findings"][0].keys() == {"level", "subject", "text", "cure"}
