"""Loggers of farcall raise nothing, whatever is attached to them."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import farcall
from farcall.log import get_logger

PACKAGE = Path(farcall.__file__).parent
WHAT = [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]


class Raising(logging.Handler):
    def __init__(self, what: BaseException) -> None:
        super().__init__()
        self.what = what
        self.calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.calls += 1
        raise self.what


class HostileText(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = get_logger("farcall.test_log")
    logger.propagate = False
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.filters.clear()


def in_another_thread(logger: logging.Logger) -> list[BaseException]:
    """Log something in a thread that is not the main one; give what that raised."""
    raised: list[BaseException] = []

    def log() -> None:
        try:
            logger.warning("something %s", "happened")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=log)
    thread.start()
    thread.join()
    return raised


@pytest.mark.parametrize("what", [*WHAT, HostileText()], ids=lambda what: type(what).__name__)
def test_what_a_handler_raises_stays_there(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], what: BaseException
) -> None:
    handler = Raising(what)
    logger.addHandler(handler)
    assert in_another_thread(logger) == []
    assert handler.calls == 1
    assert capsys.readouterr().err


def test_what_a_filter_raises_stays_there(logger: logging.Logger) -> None:
    def refuse(_: logging.LogRecord) -> bool:
        raise ValueError("no")

    logger.addFilter(refuse)
    assert in_another_thread(logger) == []


def test_ctrl_c_in_the_main_thread_is_ctrl_c(logger: logging.Logger) -> None:
    logger.addHandler(Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        logger.warning("something happened")


def test_nothing_is_said_where_the_program_wants_none(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.addHandler(Raising(ValueError("no")))
    assert in_another_thread(logger) == []
    assert capsys.readouterr().err == ""


def test_handlers_get_records_as_usual(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    assert get_logger(logger.name) is logger
    get_logger(logger.name).warning("something %s", "happened")
    (record,) = caplog.records
    assert (record.getMessage(), record.funcName) == (
        "something happened",
        "test_handlers_get_records_as_usual",
    )


def test_every_logger_of_the_package_is_one_of_these() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "log.py" or {"demos", "cli"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                assert "getLogger" not in ast.unparse(node.value.func), (
                    f"{path}:{node.lineno}: use `get_logger` of farcall.log: it never raises"
                )
