"""Names of hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import farcall
from farcall.transport.connect.addresses import resolve

NO_NAMES = ["a" * 64, "a..b", "", "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 64, "a\0b", "\ud800"]


@pytest.mark.parametrize("host", NO_NAMES, ids=ascii)
def test_a_text_that_is_no_name_is_an_os_error(host: str) -> None:
    with pytest.raises(OSError):
        resolve(host, 80, socket.SOCK_STREAM)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_name_resolves_as_python_does(host: str) -> None:
    expected = socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
    assert resolve(host, 80, socket.SOCK_STREAM) == expected


def test_no_tables_of_international_names_are_loaded_for_others() -> None:
    code = (
        "import socket, sys; from farcall.transport.connect.addresses import resolve; "
        "resolve('127.0.0.1', 80, socket.SOCK_STREAM); assert 'encodings.idna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_else_asks_the_resolver() -> None:
    """Look names up in one place: Python's own functions raise UnicodeError for some texts."""
    package = Path(farcall.__file__).parent
    asking = [
        path.name
        for path in package.rglob("*.py")
        if "getaddrinfo" in path.read_text() and "testing" not in path.parts
    ]
    assert asking == ["addresses.py"], "call `resolve` of transport/connect/addresses.py instead"
