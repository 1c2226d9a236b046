"""Processes without a setting share a secret, others don't; and a secret is not to be seen."""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from crew import PATIENCE, Crew, Member, call, join, leave_all
from known_secrets import SECRET
from launching import free_port

from farcall import rpc
from farcall.autograd.autograd import Autograd
from farcall.errors import FarcallError
from farcall.ids import Worker, new_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.current import current_agent
from farcall.runtime.membership.endpoints import open_endpoint
from farcall.runtime.membership.losses import Reception
from farcall.runtime.options.secret_files import machine_secret
from farcall.transport.connect.handshake import Identity
from farcall.transport.connect.listening import Listening
from farcall.wire.frames import Frame, encode
from farcall.wire.messages import Request

NOBODY = 65534
PROGRAMS = Path(__file__).parent / "programs"
SHOW = (
    "from farcall.runtime.options.secret_files import machine_secret; "
    "print(machine_secret()[0].reveal().decode())"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1", **more}


def test_processes_that_start_at_once_get_the_same_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOW]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(tmp_path), text=True)
        for _ in range(8)
    ]
    said = [process.communicate(timeout=PATIENCE)[0] for process in running]
    assert len(set(said)) == 1
    assert (tmp_path / "state" / "farcall" / "secret").read_text() == said[0]
    assert os.listdir(tmp_path / "state" / "farcall") == ["secret"]


@as_root
def test_a_user_without_a_home_has_a_secret_of_its_own(crew: Crew) -> None:
    folder = Path(f"/tmp/farcall-{NOBODY}")
    was_there = folder.exists()
    try:
        found = set()
        for home in ("/root", "/nowhere", "", "relative"):
            user = crew.member(HOME=home, XDG_STATE_HOME="")
            user.run(become_nobody)
            found.add(user.run(own_secret))
        assert len(found) == 1
        assert found != {own_secret()}
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (NOBODY, 0o700)
    finally:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)


def own_secret() -> bytes:
    return machine_secret()[0].reveal()


# --- strangers


def addresses() -> tuple[str, ...]:
    return current_agent().endpoint.addresses


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.marker),)


def become_nobody() -> None:
    "x".encode("idna")  # loads what only root may be able to read
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def attack(victim: Worker, path: str, secret: bytes | None, marker: str) -> list[str]:
    """Call functions of a worker by a link of our own, and return the fate of each call."""
    incarnation = new_incarnation()
    me, gate = Identity("w1", 1, incarnation, victim.host), Reception()
    listening = Listening(secret=secret, admit=gate.admit, meeting=gate.meeting, paths=(path,))
    endpoint = open_endpoint(("socket",), me, listening)
    worker = Worker("w1", 1, incarnation, endpoint.addresses, victim.host, os.getpid())
    agent = Agent(worker, endpoint, workers=[victim], gradients=Autograd, rpc_timeout=PATIENCE)
    gate.losses = agent.losses
    attempts: list[tuple[Any, tuple[Any, ...]]] = [
        (os.system, (f"touch {marker}",)),
        (lambda: Path(marker).touch(), ()),
        (operator.add, (Payload(marker), 1)),
    ]
    came = []
    for function, args in attempts:
        try:
            came.append(repr(agent.call(victim.name, function, args, {}, PATIENCE)))
        except FarcallError as error:
            came.append(type(error).__name__)
    agent.close()
    return came


def throw_frames(victim: Worker, marker: str) -> None:
    """Send requests without any handshake, and behind a broken one."""
    body = b"cposix\nsystem\n(V" + f"touch {marker}".encode() + b"\ntR."
    data = b"".join(map(bytes, encode(Frame(Request("builtins:len"), 1, body, ()))))
    for url in victim.addresses:
        place: Any = "\0" + url.removeprefix("unix:@")
        family = socket.AF_UNIX
        if url.startswith("tcp:"):
            parts = urlsplit(url)
            place, family = (parts.hostname, parts.port), socket.AF_INET
        for before in (b"", bytes(4), b"\xff" * 4, b"\x01\0\0\0\x90"):
            with socket.socket(family) as sock, contextlib.suppress(OSError):
                sock.settimeout(PATIENCE)
                sock.connect(place)
                sock.sendall(before + data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass


@as_root
@pytest.mark.parametrize("transport", ["socket", "native"])
def test_another_user_of_the_machine_runs_and_unpickles_nothing(
    crew: Crew, tmp_path: Path, transport: str
) -> None:
    if transport == "native":
        pytest.importorskip("farcall._native")
    marker = str(tmp_path / "was-here")
    tmp_path.chmod(0o777)
    victim = crew.member(FARCALL_TRANSPORTS=transport)
    victim.run(join, "w0", 0, 1, crew.init_method)
    worker = victim.run(known_worker)
    assert {url.partition(":")[0] for url in worker.addresses} == {"tcp", "unix"}
    stranger = crew.member()
    stranger.run(become_nobody)
    for path in ("tcp", "unix"):
        for secret in (None, b"w" * 32):
            came = stranger.run(attack, worker, path, secret, marker)
            assert set(came) <= {"AuthenticationFailed", "PeerLost", "LinkError"}
    stranger.run(throw_frames, worker, marker)
    assert not Path(marker).exists()
    assert victim.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(victim)


def known_worker() -> Worker:
    return current_agent().me


@as_root
def test_another_user_that_joins_makes_no_group(crew: Crew) -> None:
    """Refuse the unsigned record of a stranger. The store knows no users."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    victim = crew.member(**store)
    stranger = crew.member(**store, FARCALL_SECRET=SECRET)
    stranger.run(become_nobody)
    victim.start(join, "w0", 0, 2)
    stranger.start(join, "w1", 1, 2, listen="127.0.0.1")
    for member in (victim, stranger):
        assert "FARCALL_SECRET" in str(member.fails())


# --- settings


def test_workers_without_a_secret_are_refused_by_those_with_this_users(crew: Crew) -> None:
    members = [crew.member(), crew.member(FARCALL_INSECURE="1")]
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, 2, crew.init_method)
    for member in members:
        assert "FARCALL_SECRET" in str(member.fails())


def test_one_secret_from_a_variable_and_from_a_file_is_the_same(crew: Crew, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    run_cli("secret", "--file", str(file))
    text = file.read_text().strip()
    members = [crew.member(FARCALL_SECRET=text), crew.member(FARCALL_SECRET_FILE=str(file))]
    start(members, crew)
    assert members[0].run(call, "w1", operator.add, 1, 2) == 3
    assert members[1].run(call, "w0", operator.add, 1, 2) == 3
    leave_all(*members)


def test_a_weak_secret_is_refused_when_a_worker_starts(crew: Crew) -> None:
    member = crew.member(FARCALL_SECRET="winter2026")
    for _ in range(2):
        member.start(join, "w0", 0, 1, crew.init_method)
        error = member.fails()
        assert isinstance(error, ValueError)
        assert "make one with: farcall secret" in str(error)


def start(members: list[Member], crew: Crew) -> None:
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, len(members), crew.init_method, listen="127.0.0.1")
    for member in members:
        member.result()


def test_a_forked_child_has_the_secret(crew: Crew, tmp_path: Path) -> None:
    member = crew.member(FARCALL_SECRET=SECRET)
    member.run(join, "w0", 0, 1, crew.init_method, listen="127.0.0.1")
    assert member.run(fork_and_listen, f"file://{tmp_path}/child") == 0


def fork_and_listen(init_method: str) -> int:
    """Listen, in a forked child, where only a worker that was given a secret does."""
    rpc.shutdown()
    pid = os.fork()
    if pid == 0:
        try:
            join("child", 0, 1, init_method, listen="::")
            rpc.shutdown()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- programs


def run_cli(*arguments: str, **more: Any) -> str:
    main = "import sys; from farcall.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("given", ["variable", "file"])
def test_farcall_launch_hands_a_secret_on_that_is_not_to_be_seen(
    tmp_path: Path, given: str
) -> None:
    file = tmp_path / "secret"
    run_cli("secret", "--file", str(file))
    said = {"FARCALL_SECRET_FILE": str(file)}
    if given == "variable":
        said = {"FARCALL_SECRET": file.read_text().strip()}
    command = ("launch", "--compat", str(PROGRAMS / "keeps_secret.py"), str(tmp_path), str(file))
    assert run_cli(*command, env=environment(tmp_path, **said)) == "nothing is shown\n"
    assert not (tmp_path / "state").exists()


def test_farcall_secret_shows_one_that_is_good_or_writes_it_without_showing_it(
    tmp_path: Path,
) -> None:
    rpc.Secret(run_cli("secret").strip())
    file = tmp_path / "secret"
    assert run_cli("secret", "--file", str(file)) == ""
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    with pytest.raises(AssertionError, match="File exists"):
        run_cli("secret", "--file", str(file))
    assert file.read_bytes() == before
