"""The secret: strong ones only, and nowhere to be seen."""

from __future__ import annotations

import operator
import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path

import honest
import pytest
from crew import Crew, call, leave_all
from patience import PATIENCE

from farcall import rpc

WEAK = [
    "x",
    "winter2026",
    "changeme",
    "fifteen bytes..",
    "a" * 64,
    "abababababababababababababab",
    "0123456789012345678901234567",
    "passwordpassword",
    "correct horse battery staple",
    "Winter2026!Winter2026!",
]


@pytest.mark.parametrize("secret", WEAK)
def test_weak_secret_is_refused_with_the_command_that_makes_a_good_one(secret: str) -> None:
    with pytest.raises(ValueError, match="farcall secret") as caught:
        rpc.RpcBackendOptions(secret=secret)
    assert secret not in str(caught.value) or len(secret) < 2


@pytest.mark.parametrize("variable", ["FARCALL_SECRET", "FARCALL_SECRET_FILE"])
def test_weak_secret_of_the_environment_is_refused_and_named(
    crew: Crew, tmp_path: Path, variable: str
) -> None:
    file = tmp_path / "weak"
    file.write_text("winter2026\n")
    file.chmod(0o600)
    value = str(file) if variable.endswith("FILE") else "winter2026"
    worker = crew.member("w0", **{variable: value})
    worker.start(join_alone)
    error = worker.fails()
    assert variable in str(error)
    assert "farcall secret" in str(error)
    assert "winter2026" not in str(error)


def test_secret_shows_in_no_repr_and_no_pickle() -> None:
    options = rpc.RpcBackendOptions(secret=honest.SECRET)
    shown = [repr(options), str(options), repr(options.secret), f"{options.secret}"]
    shown.append(repr(vars(options)))
    for text in shown:
        assert honest.SECRET[8:24] not in text
    for value in (options, options.secret):
        try:
            data = pickle.dumps(value)
        except (TypeError, pickle.PicklingError):
            continue
        assert honest.SECRET[8:24].encode() not in data


PROGRAM = """
import os, subprocess, sys
from farcall import rpc
options = rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}")
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
print("mine", sorted(os.environ.items()))
print("child", subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout)
print("args", open("/proc/self/cmdline").read())
rpc.rpc_sync("w0", print, args=("called",))
rpc.shutdown()
"""


def test_secret_shows_in_no_environment_command_or_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(rpc.__file__).parents[1]),
            "FARCALL_SECRET": honest.SECRET,
            "FARCALL_LOG": "debug",
        },
    )
    assert done.returncode == 0, done.stderr
    assert "called" in done.stdout
    assert "w0: joined" in done.stderr
    assert honest.SECRET[8:24] not in done.stdout + done.stderr


def join_alone() -> None:
    options = rpc.RpcBackendOptions(init_method="tcp://127.0.0.1:0")
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)


def test_first_use_makes_a_secret_for_this_user_alone(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    file = tmp_path / "state" / "farcall" / "secret"
    state = file.stat()
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o022 == 0
    assert state.st_uid == os.geteuid()
    assert len(file.read_bytes().strip()) >= 32
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)
    other = crew.member("w0", **honest.alone(tmp_path / "other"))
    other.run(join_alone)
    second_file = tmp_path / "other" / "state" / "farcall" / "secret"
    assert second_file.read_bytes() != file.read_bytes()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_secret_that_others_could_read_or_write_is_refused(
    crew: Crew, tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "state" / "farcall"
    folder.mkdir(parents=True, mode=0o700)
    file = folder / "secret"
    file.write_text(honest.SECRET)
    file.chmod(mode)
    worker = crew.member("w0", **honest.alone(tmp_path))
    worker.start(join_alone)
    error = worker.fails()
    assert str(file) in str(error)
    assert f"{mode:04o}" in str(error)
    assert re.search("chmod 600|remove it", str(error))


def test_secret_of_another_user_is_refused(crew: Crew, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("giving a file away takes root")
    folder = tmp_path / "state" / "farcall"
    folder.mkdir(parents=True, mode=0o700)
    file = folder / "secret"
    file.write_text(honest.SECRET)
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    worker = crew.member("w0", **honest.alone(tmp_path))
    worker.start(join_alone)
    error = worker.fails()
    assert str(file) in str(error)
    assert "65534" in str(error) or "another user" in str(error)


def own_environment() -> str:
    return repr(dict(os.environ))


def test_made_secret_is_long_and_taken_out_of_the_environment(crew: Crew) -> None:
    """Make the secret by `farcall secret`: a redirected dial gives no help to guess it."""
    made = subprocess.run(
        [sys.executable, "-m", "farcall", "secret"],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    ).stdout.strip()
    assert len(made) >= 32
    assert len(set(made)) >= 8
    worker = crew.member("w0", FARCALL_SECRET=made)
    worker.run(join_alone)
    assert made[8:24] not in worker.run(own_environment)
