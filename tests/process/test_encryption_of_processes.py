"""Processes that talk over TCP: with a secret, and with certificates made as the guide says."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from crew import Crew, Member, call, join, leave_all
from known_secrets import SECRET

from farcall import rpc
from farcall.errors import AuthenticationFailed

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "secrets.md"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files that the commands of the guide make."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command of OpenSSL")
    folder = tmp_path_factory.mktemp("certificates")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [commands] = [block for block in blocks if "openssl req -x509" in block]
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True)
    return folder


def of_files(folder: Path, name: str, ca: str = "ca.pem") -> dict[str, str]:
    return {
        "FARCALL_TLS_CERT": str(folder / f"{name}.pem"),
        "FARCALL_TLS_KEY": str(folder / f"{name}.key"),
        "FARCALL_TLS_CA": str(folder / ca),
        "FARCALL_TLS_NAMES": "1",
    }


def start(crew: Crew, transport: str, *settings: dict[str, str]) -> list[Member]:
    ways = {"FARCALL_PATHS": "tcp", "FARCALL_TRANSPORTS": transport}
    members = [crew.member(**ways, **one) for one in settings]
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, len(members), crew.init_method, listen="127.0.0.1")
    for member in members:
        member.result()
    return members


def push(to: str) -> float:
    """Send buffers that go over several streams, there and back. A step."""
    total = rpc.rpc_sync(to, torch.add, args=(torch.ones(3 << 20), 1))
    return float(total.sum())


@pytest.mark.parametrize("transport", ["socket", "native"])
@pytest.mark.parametrize("kind", ["secret", "certificates", "both", "authenticated"])
def test_workers_call_each_other_over_tcp(
    crew: Crew, certificates: Path, transport: str, kind: str
) -> None:
    if transport == "native":
        pytest.importorskip("farcall._native")
    secret = {"FARCALL_SECRET": SECRET}
    settings = {
        "secret": [secret, secret],
        "certificates": [of_files(certificates, name) for name in ("w0", "w1")],
        "both": [of_files(certificates, name) | secret for name in ("w0", "w1")],
        "authenticated": [secret | {"FARCALL_ENCRYPT": "0"}] * 2,
    }
    first, second = start(crew, transport, *settings[kind])
    for member, to in ((first, "w1"), (second, "w0")):
        assert member.run(call, to, operator.add, 1, 2) == 3
        assert member.run(push, to) == 2 * (3 << 20)
    leave_all(first, second)


def test_worker_with_the_certificate_of_another_does_not_start(
    crew: Crew, certificates: Path
) -> None:
    crew.member()
    second = crew.member(**of_files(certificates, "w0"))
    second.start(join, second.name, 1, 2, crew.init_method, listen="127.0.0.1")
    error = second.fails()
    assert type(error) is ValueError
    assert "subjectAltName=DNS:w1" in str(error)


def test_worker_that_does_not_encrypt_is_told_so(crew: Crew) -> None:
    secret = {"FARCALL_SECRET": SECRET}
    first, second = start(crew, "socket", secret, secret | {"FARCALL_ENCRYPT": "0"})
    for member, to in ((first, "w1"), (second, "w0")):
        member.start(call, to, operator.add, 1, 2)
        error = member.fails()
        assert type(error) is AuthenticationFailed
        assert "FARCALL_ENCRYPT" in str(error)
    leave_all(first, second)
