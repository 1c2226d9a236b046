"""`TlsConfig`: the files of a worker's certificates, and their contents."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

LONGEST = 4096  # characters of a path, of the system
MOST_BYTES = 16 << 20  # of a file; all authorities of the web have 1/4 MiB


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates of a worker, in PEM files. They are read again when they have changed.

    Relative paths start at the working directory of the process at this moment.

    Attributes:
        cert: path of the worker's certificate, followed by intermediate ones if there are any. It
            must be good for servers and for clients.
        key: path of its private key, without a passphrase.
        ca: path of the authorities' certificates, which vouch for those of other workers.
        names: a worker's certificate must have its name among its subjectAltNames: as a DNS name,
            or as the last part of a URI, behind ":" or "/".

    Raises:
        TypeError, ValueError: a path is no path, or is the contents of the file; `names` is no
            bool.
    """

    cert: str
    key: str
    ca: str
    names: bool = False

    def __post_init__(self) -> None:
        for what in ("cert", "key", "ca"):
            object.__setattr__(self, what, _path(what, getattr(self, what)))
        if not isinstance(self.names, bool):
            raise TypeError(f"names of TlsConfig must be True or False, not {self.names!r}")


def _path(what: str, given: object) -> str:
    """Return a path of a `TlsConfig` as an absolute one: a program may go to another folder."""
    said = f"{what} of TlsConfig (FARCALL_TLS_{what.upper()}) must be the path of a file"
    if not isinstance(given, str | bytes | os.PathLike):
        raise TypeError(f"{said}, not {type(given).__name__}")
    path = os.fsdecode(given)
    if not path:
        raise ValueError(f"{said}, not empty")
    if any(sign in path for sign in ("\n", "\0", "-----BEGIN")) or len(path) > LONGEST:
        raise ValueError(f"{said}, not its contents")  # which a message must not show
    with contextlib.suppress(FileNotFoundError):  # the folder in which the process is
        path = os.path.abspath(path)
    return path


def contents(what: str, path: str) -> bytes:
    """Return the contents of a file. A FIFO would have us wait, and a device may have no end.

    Raises:
        ValueError: it can't be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"can't read the {what} of TlsConfig: {path} is no regular file")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"can't read the {what} of TlsConfig, {path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"can't read the {what} of TlsConfig: {path} has over {MOST_BYTES} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
