"""Certificates as an administrator makes them: with openssl, by the commands of the manual.

`docs/security.md` shows the commands; `Authority` runs the very block of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from farcall import rpc

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def block(name: str) -> str:
    """Return the shell code behind `<!-- name -->` on the page about security."""
    found = re.search(rf"<!-- {name} -->\n+( *)```sh\n(.*?)^\1```$", PAGE.read_text("utf-8"),
                      flags=re.MULTILINE | re.DOTALL)  # fmt: skip
    assert found is not None, f"docs/security.md has no block {name!r}"
    return dedent(found[2])


def run_block(name: str, folder: Path, **variables: str) -> None:
    """Run a block of the page in a folder."""
    done = subprocess.run(
        ["sh", "-euc", block(name)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr


class Issued(NamedTuple):
    """The files of one worker."""

    cert: Path
    key: Path
    ca: Path

    def config(self, **more: Any) -> Any:
        """Return what the option `tls` takes."""
        return rpc.TlsConfig(str(self.cert), str(self.key), str(self.ca), **more)

    def environment(self) -> dict[str, str]:
        return {
            "FARCALL_TLS_CERT": str(self.cert),
            "FARCALL_TLS_KEY": str(self.key),
            "FARCALL_TLS_CA": str(self.ca),
        }


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        run_block("authority", self._folder)

    @classmethod
    def in_folder(cls, folder: Path) -> Authority:
        """Return the authority that is in a folder already."""
        made = cls.__new__(cls)
        made._folder = folder
        return made

    def issue(self, worker: str, *, days: int = 30) -> Issued:
        """Return a certificate for a worker of that name; of a time that is over if `days` < 0."""
        run_block("worker", self._folder, NAME=worker, DAYS=str(days))
        paths = (self._folder / f"{worker}.crt", self._folder / f"{worker}.key")
        return Issued(*paths, self._folder / "ca.crt")
