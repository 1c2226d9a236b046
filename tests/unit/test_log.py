"""Loggers of farcall raise nothing and hold nothing up, whatever is attached to them."""

from __future__ import annotations

import ast
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest
from patience import PATIENCE

import farcall
import farcall.log
from farcall.log import get_logger, records_later
from farcall.threads import FarcallThread

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
def test_an_error_of_a_handler_stays_there(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], what: BaseException
) -> None:
    handler = Raising(what)
    logger.addHandler(handler)
    assert in_another_thread(logger) == []
    assert handler.calls == 1
    assert capsys.readouterr().err


def test_an_error_of_a_filter_stays_there(logger: logging.Logger) -> None:
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


class Handler(logging.Handler):
    """Calls a function with each record."""

    def __init__(self, handle: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self.emit = handle  # type: ignore[method-assign]


def in_a_thread_of_farcalls(run: Callable[[], object]) -> None:
    ran = threading.Event()

    def work() -> None:
        run()
        ran.set()

    FarcallThread(work, "farcall-test-log").start()
    assert ran.wait(PATIENCE)


@pytest.mark.usefixtures("brief_handlers")
def test_handler_may_wait_for_a_thread_of_farcalls_that_logs(logger: logging.Logger) -> None:
    went_on, ended = threading.Event(), threading.Event()

    def wait(_: logging.LogRecord) -> None:
        if went_on.wait(PATIENCE):
            ended.set()

    logger.addHandler(Handler(wait))
    in_a_thread_of_farcalls(lambda: (logger.warning("it waits"), went_on.set()))
    assert ended.wait(PATIENCE)


@pytest.mark.usefixtures("brief_handlers")
def test_no_other_thread_of_farcalls_waits_for_such_a_handler(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on = threading.Event()
    lines: list[str] = []

    def wait(record: logging.LogRecord) -> None:
        assert went_on.wait(PATIENCE)
        lines.append(record.getMessage())

    logger.addHandler(Handler(wait))
    for number in range(20):
        in_a_thread_of_farcalls(lambda number=number: logger.warning("%d", number))  # type: ignore[misc]
    assert lines == []
    went_on.set()
    monkeypatch.setattr(farcall.log, "STAND_BACK", PATIENCE)
    monkeypatch.setattr(farcall.log, "LONGEST_STAND_BACK", PATIENCE)
    in_a_thread_of_farcalls(lambda: logger.warning("20"))
    assert lines == [str(number) for number in range(21)]


def test_line_of_a_thread_of_farcalls_is_there_before_the_thread_goes_on(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    place: ContextVar[int] = ContextVar("place", default=-1)
    seen: list[tuple[int, int, str | None]] = []

    def take(record: logging.LogRecord) -> None:
        seen.append((place.get(), len(seen), record.threadName))
        raise ValueError("no")

    def log() -> None:
        for number in range(50):
            place.set(number)
            logger.warning("something happened")
            assert seen[-1] == (number, number, "farcall-test-log")

    logger.addHandler(Handler(take))
    in_a_thread_of_farcalls(log)
    assert "a handler of farcall's log raised" in capsys.readouterr().err


def test_thread_that_the_system_does_not_give_is_done_without(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    logger.addHandler(Handler(lambda record: lines.append(record.getMessage())))
    start = FarcallThread.start

    def refuse(thread: FarcallThread) -> None:
        if thread.name == "farcall-log":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(FarcallThread, "start", refuse)
    in_a_thread_of_farcalls(lambda: logger.warning("something happened"))
    assert lines == ["something happened"]


def test_a_record_logged_in_a_handler_leads_to_no_handler(logger: logging.Logger) -> None:
    lines: list[str] = []

    def log_again(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        logger.warning("again")
        get_logger("farcall.test_log.other").warning("again")

    logger.addHandler(Handler(log_again))
    logger.warning("here")
    in_a_thread_of_farcalls(lambda: logger.warning("there"))
    logger.warning("here")
    assert lines == ["here", "there", "here"]


@pytest.mark.parametrize("run", [lambda run: run(), in_a_thread_of_farcalls], ids=["here", "there"])
def test_records_are_kept_until_the_end_of_work_that_others_wait_for(
    logger: logging.Logger, run: Callable[[Callable[[], object]], None]
) -> None:
    lines: list[str] = []

    def log() -> None:
        with contextlib.suppress(ValueError), records_later():
            logger.warning("first")
            with records_later():
                logger.warning("second")
            assert lines == []
            raise ValueError("kept")
        assert lines == ["first", "second"]
        logger.warning("third")

    logger.addHandler(Handler(lambda record: lines.append(record.getMessage())))
    run(log)
    assert lines == ["first", "second", "third"]


LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOCKS = ("lock", "changed", "_state", "_role", "_interest", "starting", "closing", "reading")


def logs_itself(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    whose = ast.unparse(node.func.value).lower()
    return node.func.attr in LEVELS and whose.endswith(("logger", "_log", "_strangers"))


def called_of_self(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr if ast.unparse(node.func.value) == "self" else None
    return None


def lines_under_locks(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that log, or call a method of the same class that does, under a lock."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef | ast.Module):
            continue
        methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
        logging_ones: set[str] = set()
        before = None
        while before != logging_ones:
            before = set(logging_ones)
            for name, method in methods.items():
                inside = list(ast.walk(method))
                if any(logs_itself(one) or called_of_self(one) in before for one in inside):
                    logging_ones.add(name)
        for block in (one for method in methods.values() for one in ast.walk(method)):
            if not isinstance(block, ast.With):
                continue
            what = " ".join(ast.unparse(item.context_expr) for item in block.items)
            if any(lock in what for lock in LOCKS) and "records_later" not in what:
                for one in (node for part in block.body for node in ast.walk(part)):
                    if logs_itself(one) or called_of_self(one) in logging_ones:
                        yield one.lineno  # type: ignore[attr-defined]


def test_no_handler_is_called_under_a_lock() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        found = list(lines_under_locks(ast.parse(path.read_text())))
        assert found == [], f"{path}: lines {found}: log after the lock is released"


def test_lines_under_locks_are_found() -> None:
    program = """
class A:
    def log(self):
        self.says()
    def says(self):
        logger.debug("it")
    def bad(self):
        with self._lock:
            if self.log():
                pass
        with records_later(), self._closing:
            self.log()
        self.log()
"""
    assert list(lines_under_locks(ast.parse(program))) == [9]
