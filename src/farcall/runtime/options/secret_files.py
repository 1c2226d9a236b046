"""Secrets in files: one that a user names, and this user's own, which is made at its first use.

A file with a secret is read only if no other user could have read or written it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator

from farcall.log import get_logger
from farcall.runtime.options.secret import Secret

logger = get_logger("farcall")

LONGEST = 4096  # bytes
NAME = "secret"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITERS = stat.S_IWGRP | stat.S_IWOTH


def read_secret(path: str) -> Secret:
    """Return the secret in a file that belongs to this user or root, and that no other can read.

    Line ends at the end of a text don't belong to it.

    Raises:
        ValueError: it can't be read, others can read it, or its contents are no good secret.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None
    with _closing(descriptor):
        try:
            return _read(descriptor, path, {os.geteuid(), 0}, f"chmod 600 {path}")
        except OSError as error:  # a file of the kernel, or a broken disk
            raise ValueError(f"can't read {path}: {error.strerror}") from None


def write_secret(path: str, secret: Secret) -> None:
    """Write a secret to a new file that only this user can read.

    Raises:
        OSError: there is such a file, or it can't be written.
    """
    descriptor = _create(path, None)
    with _closing(descriptor):
        _write(descriptor, secret)


def machine_secret() -> tuple[Secret, str]:
    """Return the secret of this user on this machine, and why it is not in the user's home.

    The first process makes it; if many start at once, all get the same. It is in the folder for
    state of the XDG Base Directory Specification; where that can't be, in one that lasts until the
    machine is started again. The reason is empty for the former.

    Raises:
        ValueError: the file there is not this user's alone, or no folder can be had.
    """
    reasons: list[str] = []
    for base, folder in _places():
        path = os.path.join(base, folder)
        try:
            _check_ancestor(base)
            os.makedirs(base, mode=0o700, exist_ok=True)
            return _secret_in(path), "; ".join(reasons) and f"{'; '.join(reasons)}: it is in {path}"
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
    raise ValueError(
        f"this user has no folder for a secret ({'; '.join(reasons)}): set FARCALL_SECRET_FILE or "
        "FARCALL_SECRET, or XDG_STATE_HOME to a folder that this user alone can write"
    )


def machine_secret_file() -> str | None:
    """Return where the secret of this user on this machine is, or None if it is yet to be made."""
    paths = [os.path.join(base, folder, NAME) for base, folder in _places()]
    return next(filter(os.path.lexists, paths), None)


def _places() -> Iterator[tuple[str, str]]:
    """Yield folders that exist or may be made, and the name of farcall's own in each."""
    user = os.geteuid()
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification: others are to be ignored
        yield state, "farcall"
    else:
        home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
        if os.path.isabs(home):  # else this user has none
            yield os.path.join(home, ".local", "state"), "farcall"
    if os.path.isdir(f"/run/user/{user}"):
        yield f"/run/user/{user}", "farcall"
    yield "/tmp", f"farcall-{user}"


def _check_ancestor(path: str) -> None:
    """Leave the home of another user alone: `sudo` may keep HOME.

    Raises:
        PermissionError: the folder that would get new ones belongs to another user.
    """
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if os.stat(path).st_uid not in (os.geteuid(), 0):
        raise PermissionError(0, f"{path} belongs to another user")


def _secret_in(path: str) -> Secret:
    """Return the secret in a folder, which is made if there is none.

    Raises:
        OSError: the folder can't be had.
        ValueError: something is wrong with it that its user has to look at.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask
    _refuse_link(path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with _closing(folder):
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise PermissionError(0, f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & _WRITERS:
            raise ValueError(f"{path} can be written by others: chmod 700 {path}")
        with contextlib.suppress(FileNotFoundError):
            return _secret_at(folder, path)
        _make_secret(folder)
        return _secret_at(folder, path)


def _refuse_link(path: str) -> None:
    if os.path.islink(path):
        raise ValueError(f"{path} is a symbolic link: farcall follows none to a secret; remove it")


def _secret_at(folder: int, path: str) -> Secret:
    file = os.path.join(path, NAME)
    _refuse_link(file)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(NAME, flags, dir_fd=folder)
    with _closing(descriptor):
        try:
            return _read(descriptor, file, {os.geteuid()}, "they may know it")
        except ValueError as error:
            raise ValueError(f"{error}; if you remove it, a new one is made") from None


def _make_secret(folder: int) -> None:
    """Make the secret, unless another process does so now. It gets its name when it is whole."""
    name = f".{NAME}-{secrets.token_hex(8)}"
    descriptor = _create(name, folder)
    try:
        with _closing(descriptor):
            _write(descriptor, Secret.generate())
            found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            raise PermissionError(0, "files there have another owner or mode than they are given")
        with contextlib.suppress(FileExistsError):
            os.link(name, NAME, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(name, dir_fd=folder)


def _create(path: str, folder: int | None) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600, dir_fd=folder)


def _write(descriptor: int, secret: Secret) -> None:
    os.fchmod(descriptor, 0o600)  # whatever the umask
    os.write(descriptor, secret.reveal() + b"\n")
    os.fsync(descriptor)


def _read(descriptor: int, path: str, owners: set[int], cure: str) -> Secret:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_uid not in owners:
        raise ValueError(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(f"{path} may be read or changed by others (mode {mode:04o}): {cure}")
    data = os.read(descriptor, LONGEST + 1)
    if len(data) > LONGEST:
        raise ValueError(f"{path} has more than {LONGEST} bytes: that is no secret")
    try:
        return Secret(_text_or_bytes(data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
