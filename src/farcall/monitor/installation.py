"""The software that workers started here would run, and their credentials."""

from __future__ import annotations

import importlib
import os
import platform
import stat
import sys
from collections.abc import Iterator
from importlib import metadata

from farcall.monitor.findings import Finding, fine
from farcall.runtime.options import strength, switches
from farcall.runtime.options.credential import FILE_VARIABLE, VARIABLE
from farcall.runtime.options.secret import Secret
from farcall.runtime.options.secret_files import machine_secret, machine_secret_file, read_secret
from farcall.transport.connect.credentials import LinkCredentials
from farcall.version import VERSION

NATIVE_MODULE = "farcall._native"
_ELSEWHERE = "; workers of other machines need FARCALL_SECRET, see `farcall secret`"


def versions() -> Iterator[Finding]:
    """Look which farcall, torch and Python there are, and which transport workers would run on."""
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
        yield Finding("wrong", "versions", "torch is not installed", "pip install torch")
    yield fine(
        "versions",
        f"farcall {VERSION}, {torch}, Python {platform.python_version()}, {sys.platform}",
    )
    wanted = os.environ.get("FARCALL_TRANSPORTS", "")
    if wanted and "native" not in wanted.split(","):
        yield fine("transport", f"socket, as FARCALL_TRANSPORTS={wanted} says")
        return
    try:
        native = importlib.import_module(NATIVE_MODULE)
    except ImportError as error:
        yield Finding(
            "look",
            "transport",
            f"the native transport is not there ({error}): calls are slower, without shared memory",
            "install farcall where there is a C++20 compiler",
        )
        return
    if native.has_crypto():
        yield fine("transport", "native, with OpenSSL's libcrypto")
    else:
        yield Finding(
            "look",
            "transport",
            "the native transport found no libcrypto.so of OpenSSL: workers that are given a "
            "secret run on the slower transport 'socket'",
            "install OpenSSL's libcrypto (libssl3 on Debian and Ubuntu)",
        )


def secret() -> Iterator[Finding]:
    """Look where the secret comes from that workers would use, and whether it is good."""
    try:
        tls = switches.tls(None)
        if tls is not None:
            LinkCredentials(None, tls)
            yield fine("certificates", f"FARCALL_TLS_CERT={tls.cert}, _KEY={tls.key}, _CA={tls.ca}")
        insecure = switches.switch("insecure", None, "FARCALL_INSECURE", default=False)
        encrypts = switches.switch("encrypt", None, "FARCALL_ENCRYPT", default=True)
    except (ValueError, TypeError, OSError) as error:
        yield Finding("wrong", "certificates", str(error), "correct the variables, or unset them")
        return
    if not encrypts:
        yield Finding(
            "look",
            "encryption",
            "FARCALL_ENCRYPT=0: what goes over TCP is authenticated, and can be read",
            "unset it on all workers, unless the network is trusted",
        )
    try:
        found = _secret()
    except ValueError as error:
        yield Finding("wrong", "secret", str(error), "see the message; or: farcall secret")
        return
    if found is not None:
        yield fine("secret", found)
    elif tls is None and insecure:
        yield Finding(
            "look",
            "secret",
            "FARCALL_INSECURE=1, and there is no secret: a process that reaches a worker's port "
            "can run code in it",
            "unset it, and set FARCALL_SECRET to what `farcall secret` prints",
        )
    elif tls is None:
        yield from _of_this_machine()


def _secret() -> str | None:
    """Describe the secret that was given, and say where it is; None: none was given.

    Raises:
        ValueError: it can't be used.
    """
    path = os.environ.get(FILE_VARIABLE)
    if os.environ.get(VARIABLE):
        try:
            return f"of {VARIABLE}, {_strength(Secret(os.environ[VARIABLE]))}"
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
    if not path:
        return None
    try:
        return f"of {FILE_VARIABLE}={path}, {_mode(path)}, {_strength(read_secret(path))}"
    except ValueError as error:
        raise ValueError(f"{FILE_VARIABLE}: {error}") from None


def _of_this_machine() -> Iterator[Finding]:
    path = machine_secret_file()
    if path is None:
        yield fine("secret", f"this user's own, which the first worker makes{_ELSEWHERE}")
        return
    try:
        found, _ = machine_secret()
    except ValueError as error:
        yield Finding("wrong", "secret", str(error), "see the message")
        return
    yield fine(
        "secret", f"this user's own, in {path}, {_mode(path)}, {_strength(found)}{_ELSEWHERE}"
    )


def _mode(path: str) -> str:
    try:
        return f"mode {stat.S_IMODE(os.stat(path).st_mode):04o}"
    except OSError as error:
        return f"which can't be looked at: {error.strerror}"


def _strength(given: Secret) -> str:
    return f"{strength.bits(given.reveal()):.0f} bits strong by an estimate"
