"""Files of a `TlsConfig` are read again when they have changed, and only then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from farcall.transport.connect import credentials
from farcall.transport.connect.credentials import Renewed
from farcall.transport.connect.tls_config import TlsConfig

Contents = tuple[bytes, bytes, bytes]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TlsConfig:
    """Return files that are no certificates, which is not looked at here."""
    monkeypatch.setattr(credentials, "_check_time", lambda *_: None)
    paths = [tmp_path / name for name in ("cert", "key", "ca")]
    for path in paths:
        path.write_text("1")
    return TlsConfig(*map(str, paths))


def made(*files: bytes) -> Contents:
    cert, key, ca = files
    return cert, key, ca


def test_new_contents_are_taken(config: TlsConfig) -> None:
    renewed = Renewed(config, "tests", made)
    assert renewed.get() == (b"1", b"1", b"1")
    Path(config.key).write_text("22")
    assert renewed.get() == (b"1", b"22", b"1")


def test_file_is_looked_at_again_once_its_mode_is_mended(config: TlsConfig) -> None:
    def make(*files: bytes) -> Contents:
        credentials._check_mode(config.key)
        return made(*files)

    Path(config.key).chmod(0o600)
    renewed = Renewed(config, "tests", make)
    Path(config.key).write_text("22")
    Path(config.key).chmod(0o644)
    assert renewed.get() == (b"1", b"1", b"1")
    Path(config.key).chmod(0o600)
    assert renewed.get() == (b"1", b"22", b"1")


def test_change_that_leaves_times_and_size_is_noticed(
    config: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the clock of the file system stand, as it may for some milliseconds or two seconds."""
    renewed = Renewed(config, "tests", made)
    state = credentials._state_of(config.key)
    monkeypatch.setattr(credentials, "_state_of", lambda path: state)
    Path(config.key).write_text("2")
    assert renewed.get() == (b"1", b"2", b"1")
    Path(config.key).write_text("3")
    assert renewed.get() == (b"1", b"3", b"1")


def test_files_that_are_replaced_meanwhile_are_left_for_the_next_time(
    config: TlsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = Renewed(config, "tests", made)
    read = renewed._read

    def read_and_replace() -> list[bytes]:
        files = read()
        Path(config.key).write_text("whole")
        return files

    Path(config.key).write_text("half")
    monkeypatch.setattr(renewed, "_read", read_and_replace)
    assert renewed.get() == (b"1", b"1", b"1")
    monkeypatch.setattr(renewed, "_read", read)
    assert renewed.get() == (b"1", b"whole", b"1")
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, RecursionError])
def test_whatever_is_raised_leaves_the_former_and_is_said_once(
    config: TlsConfig, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def make(*files: bytes) -> Contents:
        if files[1] == b"bad":
            raise error("it is bad")
        return made(*files)

    renewed = Renewed(config, "tests", make)
    Path(config.key).write_text("bad")
    for _ in range(3):
        assert renewed.get() == (b"1", b"1", b"1")
    [record] = caplog.records
    assert "going on with the former certificate for tests: " in record.getMessage()
    Path(config.key).unlink()
    for _ in range(3):
        assert renewed.get() == (b"1", b"1", b"1")
    assert "can't read the key" in caplog.records[1].getMessage()
    assert len(caplog.records) == 2
    Path(config.key).write_text("2")
    assert renewed.get() == (b"1", b"2", b"1")


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    handler = logging.Handler()
    logger = logging.getLogger("farcall.transport")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_handler_of_the_log_may_make_a_link(config: TlsConfig, handler: logging.Handler) -> None:
    """Make a link, as a handler does that sends each line to a worker."""
    renewed = Renewed(config, "tests", made)
    got: list[Contents] = []
    handler.emit = lambda record: got.append(renewed.get())  # type: ignore[method-assign]
    Path(config.key).write_text("22")
    thread = threading.Thread(target=renewed.get, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert got == [(b"1", b"22", b"1")]
