"""The credential of a worker: a secret that it was given, else this machine's own."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple, Protocol

from farcall.log import get_logger
from farcall.runtime.options.secret import Secret
from farcall.runtime.options.secret_files import machine_secret, read_secret
from farcall.transport.connect.tls_config import TlsConfig

logger = get_logger("farcall")

VARIABLE = "FARCALL_SECRET"
FILE_VARIABLE = "FARCALL_SECRET_FILE"


class _Options(Protocol):
    @property
    def secret(self) -> Secret | None: ...
    @property
    def tls(self) -> TlsConfig | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def uses_machine_secret(self) -> bool: ...


class Credential(NamedTuple):
    """The credential that a worker proves itself with.

    Attributes:
        secret: None: it does not.
        confined: whether it talks to workers of its own machine only, since it was given nothing
            that those of others could have.
        tls: certificates that it was given, or None.
    """

    secret: Secret | None
    confined: bool
    tls: TlsConfig | None = None

    @property
    def key(self) -> bytes | None:
        """The bytes of the secret."""
        return None if self.secret is None else self.secret.reveal()


class Credentials:
    """The credential of this process's workers. One thread at a time.

    The variable is taken out of the environment, so that what the process starts, and what shows
    its environment, does not have it; a later worker finds it here.
    """

    def __init__(self) -> None:
        self._said = ""
        self._noted = False

    def choose(self, options: _Options) -> Credential:
        """Return the secret of the options, of `FARCALL_SECRET`, of `FARCALL_SECRET_FILE`, or ours.

        Raises:
            ValueError: it is no good secret, or can't be read; the message says what to do.
        """
        said = _take(VARIABLE)
        if said is not None:
            self._said = said
        given = options.secret or self._given()
        if given is not None or options.tls is not None:
            return Credential(given, confined=False, tls=options.tls)
        if not options.uses_machine_secret:
            return Credential(None, confined=not options.insecure)
        secret, reason = machine_secret()
        if reason and not self._noted:
            self._noted = True
            logger.info("the secret of this user is not in the user's home: %s", reason)
        return Credential(secret, confined=True)

    def _given(self) -> Secret | None:
        path = os.environ.get(FILE_VARIABLE)
        try:
            if self._said:
                return Secret(self._said)
            return read_secret(path) if path else None
        except ValueError as error:
            raise ValueError(f"{VARIABLE if self._said else FILE_VARIABLE}: {error}") from None


def _take(variable: str) -> str | None:
    """Return a variable, and take it out of the environment, also out of what the system shows.

    The system (`/proc`, `ps e`) shows the memory in which the process got its environment, and
    deleting a variable does not clear that.
    """
    said = os.environ.get(variable)
    if said is None:
        return None
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    there = getenv(os.fsencode(variable))
    if there is not None:  # else the process had not got it from the system
        ctypes.memset(there, 0, len(ctypes.string_at(there)))
    del os.environ[variable]
    return said
