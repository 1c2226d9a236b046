"""Every wrong file or value of a `TlsConfig` is refused by name, at once, and shows no key."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from authorities import DAY, Authority
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from patience import PATIENCE

from farcall.runtime.membership.signing import signer_of
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.transport.connect import chains
from farcall.transport.connect.credentials import LinkCredentials
from farcall.transport.connect.tls_config import MOST_BYTES, TlsConfig

WHAT = {"cert": "certificate", "key": "key", "ca": "CA"}
PEM, DER = serialization.Encoding.PEM, serialization.Encoding.DER


class Given(NamedTuple):
    """The right files of a worker, and a folder for wrong ones."""

    config: TlsConfig
    authority: Authority
    folder: Path

    def with_file(self, which: str, path: str | Path) -> TlsConfig:
        paths = {name: getattr(self.config, name) for name in WHAT}
        return TlsConfig(**{**paths, which: str(path)})

    def written(self, data: bytes, mode: int = 0o600) -> Path:
        path = self.folder / "wrong"
        path.write_bytes(data)
        path.chmod(mode)
        return path


@pytest.fixture
def given(tmp_path: Path) -> Given:
    authority = Authority(tmp_path)
    return Given(authority.issue("w0", "w0"), authority, tmp_path)


def error_of(config: TlsConfig, act: Callable[[TlsConfig], object]) -> str:
    """Return the error of an act that must end by itself, whatever the files are."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act(config)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    [error] = errors
    assert type(error) is ValueError
    return str(error)


# Objects that a worker makes of its files at its start, in this order, and again when they change.
USES: dict[str, Callable[[TlsConfig], object]] = {
    "signatures": lambda config: signer_of(None, config, "w0"),
    "links": lambda config: LinkCredentials(tls=config),
}
each_use = pytest.mark.parametrize("use", USES)
each_file = pytest.mark.parametrize("which", WHAT)


# --- files that can't be read


def fifo(given: Given) -> Path:
    path = given.folder / "fifo"
    os.mkfifo(path)
    return path


def link_to_itself(given: Given) -> Path:
    path = given.folder / "loop"
    path.symlink_to(path)
    return path


def huge(given: Given) -> Path:
    path = given.written(b"")
    os.truncate(path, MOST_BYTES + 1)
    return path


UNREADABLE: dict[str, tuple[Callable[[Given], str | Path], str]] = {
    "missing": (lambda _: "/nonexistent/file", "No such file"),
    "folder": (lambda given: given.folder, "Is a directory"),
    "link to itself": (link_to_itself, "Too many levels"),
    "long name": (lambda given: given.folder / ("x" * 300), "File name too long"),
    "FIFO": (fifo, "no regular file"),
    "endless device": (lambda _: "/dev/zero", "no regular file"),
    "empty device": (lambda _: "/dev/null", "no regular file"),
    "huge": (huge, f"over {MOST_BYTES} bytes"),
}


@each_use
@each_file
@pytest.mark.parametrize("kind", UNREADABLE)
def test_file_that_can_not_be_read_is_named(given: Given, use: str, which: str, kind: str) -> None:
    make, words = UNREADABLE[kind]
    path = make(given)
    error = error_of(given.with_file(which, path), USES[use])
    assert error.startswith(f"can't read the {WHAT[which]} of TlsConfig")
    assert str(path) in error
    assert words in error


# --- files with something else in them

BROKEN = {
    "empty": b"",
    "noise": bytes(range(256)),
    "text": b"this is no certificate\n",
    "half": b"-----BEGIN CERTIFICATE-----\nMIIB",
}


@each_file
@pytest.mark.parametrize("kind", [*BROKEN, "DER", "another's"])
def test_file_that_is_no_pem_or_another_is_named(given: Given, which: str, kind: str) -> None:
    pem = {name: Path(getattr(given.config, name)).read_bytes() for name in WHAT}
    if kind == "DER":
        data = x509.load_pem_x509_certificate(pem["cert"]).public_bytes(DER)
        if which == "key":
            key = serialization.load_pem_private_key(pem["key"], None)
            nothing = serialization.NoEncryption()
            data = key.private_bytes(DER, serialization.PrivateFormat.PKCS8, nothing)
    elif kind == "another's":
        data = pem["cert" if which == "key" else "key"]
    else:
        data = BROKEN[kind]
    path = given.written(data)
    error = error_of(given.with_file(which, path), USES["signatures"])
    assert str(path) in error
    assert f"the {WHAT[which]} is none in PEM format" in error or (
        which == "cert" and f"{path} is no certificate in PEM format" in error
    )


def encrypted(given: Given) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    hidden = serialization.BestAvailableEncryption(b"a passphrase")
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden)


def of_another(given: Given) -> bytes:
    return Path(given.authority.issue("w1", "w1").key).read_bytes()


def for_no_signatures(given: Given) -> bytes:
    nothing = serialization.NoEncryption()
    key = x25519.X25519PrivateKey.generate()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, nothing)


KEYS: dict[str, tuple[Callable[[Given], bytes], str]] = {
    "passphrase": (encrypted, "has a passphrase: store it without one"),
    "of another": (of_another, "does not belong to the certificate"),
    "for no signatures": (for_no_signatures, "signs nothing: take one of"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_key_that_does_not_fit_is_named(given: Given, kind: str) -> None:
    make, words = KEYS[kind]
    path = given.written(make(given))
    error = error_of(given.with_file("key", path), USES["signatures"])
    assert str(path) in error
    assert words in error


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_key_that_others_can_read_is_named_with_what_to_do(given: Given, mode: int) -> None:
    path = given.written(Path(given.config.key).read_bytes(), mode)
    error = error_of(given.with_file("key", path), USES["links"])
    assert f"chmod 600 {path}" in error


def days(begin: float, end: float) -> Any:
    return {"days": (begin, end)}


TIMES: dict[str, tuple[Callable[[Authority, Path], TlsConfig], str]] = {
    "own is over": (
        lambda ours, _: ours.issue("w0", "w0", **days(-2, -1)),
        "w0.crt has expired on {before}: renew it",
    ),
    "own is to come": (
        lambda ours, _: ours.issue("w0", "w0", **days(1, 2)),
        "its certificate is not valid before {after}",
    ),
    "the authority's is over": (
        lambda _, folder: Authority(folder, "old", **days(-3, -1)).issue("w0", "w0"),
        "the certificate of the CA above its own has expired on {before}: renew it",
    ),
    "the authority's is to come": (
        lambda _, folder: Authority(folder, "new", **days(1, 3)).issue("w0", "w0"),
        "the certificate of the CA above its own is not valid before {after}",
    ),
    "one between is over": (
        lambda ours, folder: Authority(folder, "sub", above=ours, **days(-3, -1)).issue("w0", "w0"),
        "the certificate of the CA above its own has expired on {before}: renew it",
    ),
}


@pytest.mark.parametrize("kind", TIMES)
def test_certificate_of_another_time_is_named(tmp_path: Path, kind: str) -> None:
    make, words = TIMES[kind]
    config = make(Authority(tmp_path), tmp_path)
    before, after = (f"{chains.now() + DAY * day:%Y-%m-%d}" for day in (-1, 1))
    error = error_of(config, USES["signatures"])
    assert config.cert in error
    assert words.format(before=before, after=after) in error


# --- values that are no paths


@each_file
@pytest.mark.parametrize("value", [None, 5, True, ["w.pem"], 1.5])
def test_path_of_another_type_is_refused(which: str, value: object) -> None:
    paths: dict[str, Any] = {**dict.fromkeys(WHAT, "w.pem"), which: value}
    with pytest.raises(TypeError, match=rf"^{which} of TlsConfig \(FARCALL_TLS_{which.upper()}\)"):
        TlsConfig(**paths)


SECRET_PART = "MHcCAQEEIFp7Wt"


@each_file
@pytest.mark.parametrize(
    "value",
    [
        f"-----BEGIN EC PRIVATE KEY-----{SECRET_PART}",
        f"\n{SECRET_PART}\n",
        f"{SECRET_PART}\0",
        SECRET_PART * 1000,
        SECRET_PART.encode() + b"\0",
    ],
)
def test_key_in_the_place_of_its_path_is_not_shown(which: str, value: Any) -> None:
    paths: dict[str, Any] = {**dict.fromkeys(WHAT, "w.pem"), which: value}
    with pytest.raises(ValueError, match="must be the path of a file, not its contents") as caught:
        TlsConfig(**paths)
    assert SECRET_PART not in str(caught.value)


@pytest.mark.parametrize("value", ["yes", "0", 0, 1, None])
def test_names_are_bound_or_not(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^names of TlsConfig must be True or False"):
        TlsConfig("w.pem", "w.key", "ca.pem", value)


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_paths_of_any_type_are_taken_and_stay_when_the_process_moves(
    given: Given, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(given.folder)
    relative = [kind(os.path.relpath(getattr(given.config, name))) for name in WHAT]
    config = TlsConfig(*relative)
    monkeypatch.chdir("/")
    assert config == given.config
    assert USES["signatures"](config)
    assert USES["links"](config)


def test_variable_for_names_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse it: a worker that should check names would go on without certificates."""
    monkeypatch.setenv("FARCALL_TLS_NAMES", "1")
    with pytest.raises(ValueError, match=r"FARCALL_TLS_NAMES is .*set FARCALL_TLS_CERT"):
        RpcBackendOptions()
    monkeypatch.setenv("FARCALL_TLS_NAMES", "0")
    assert RpcBackendOptions().tls is None
