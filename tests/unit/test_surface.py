"""What a newcomer tries first in an interpreter or a shell."""

from __future__ import annotations

import subprocess
import sys

from patience import PATIENCE

from farcall import rpc


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=PATIENCE
    )


def test_modules_are_there_after_import_farcall() -> None:
    code = "import farcall; print(farcall.rpc.rpc_sync.__name__, farcall.optim.__name__)"
    assert run("-c", code).stdout.split() == ["rpc_sync", "farcall.optim"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert "has no attribute 'rcp'" in run("-c", "import farcall; farcall.rcp").stderr


def test_dir_shows_what_is_public() -> None:
    assert dir(rpc) == sorted(rpc.__all__)


def test_python_m_farcall_is_the_command() -> None:
    assert "demo" in run("-m", "farcall", "--help").stdout
