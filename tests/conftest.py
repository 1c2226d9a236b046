"""For all tests."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hostile_reports import pytest_runtest_makereport, pytest_sessionstart  # noqa: F401
from marks import Watch, broken_promise, marks_of
from patience import PATIENCE
from timeouts import pytest_timeout_set_timer  # noqa: F401
from warm_starts import WarmStarts, Zygote

import farcall.log

# A shell has what it starts in the background ignore Ctrl-C, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A run has a secret of its own, and leaves that of the user who runs it alone.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="farcall-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Handlers of logs get the lines of farcall's threads before those go on, so that a test which looks
# at a line finds it on a slow machine, too. In a program threads wait for a moment only.
MOMENTS = {name: getattr(farcall.log, name) for name in ("STAND_BACK", "LONGEST_STAND_BACK")}
for name in MOMENTS:
    setattr(farcall.log, name, PATIENCE)


@pytest.fixture
def brief_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads of farcall wait for handlers of logs as long as in a program."""
    for name, seconds in MOMENTS.items():
        monkeypatch.setattr(farcall.log, name, seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-transport",
        action="store_true",
        help="run each case of tests/behaviour over each transport (tests/pairing.py)",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in marks_of(item.path):
        item.add_marker(mark)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that have none of the tests that are asked for: importing them takes long."""
    if config.option.markexpr == "fast" and collection_path.match("test_*.py"):
        return "fast" not in marks_of(collection_path) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, then freeze the tests, since it looks through all.

    There is little garbage then, and the collector would take 0.4 s to find it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish() -> None:
    """Have all loggers propagate: pytest adds its handlers to each other one, six times a test.

    torch has 42 loggers that don't, which took 0.4 ms of each test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "fast":
        config.pluginmanager.register(KeepsFast(), "keeps-fast")


_warm_starts = WarmStarts(Zygote.of_this_process)


@pytest.hookimpl(wrapper=True, specname="pytest_sessionstart")
def pytest_workers_start() -> Generator[None, object, object]:
    """Have xdist's workers, which start here, be forks of one zygote: their tests need one, too."""
    if "LD_PRELOAD" in os.environ:  # a sanitizer may have a thread, which a fork would lack
        return (yield)
    with _warm_starts.given():
        return (yield)


def _preloads(item: pytest.Item) -> tuple[str, ...]:
    """Return the modules that the programs of a test are to have, without those of no package."""
    names = [name for mark in item.iter_markers("preloads") for name in mark.args]
    return tuple(name for name in names if find_spec(name.partition(".")[0]) is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test and its fixtures warm starts of Python, but for one with the marker `cold`."""
    if item.get_closest_marker("cold") is not None:
        return (yield)
    with _warm_starts.given(_preloads(item)):
        return (yield)


class KeepsFast:
    """Fails fast tests that start processes or open sockets, their fixtures included."""

    def __init__(self) -> None:
        self._watch = Watch()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._watch.begin()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if reason := broken_promise(self._watch.end()):
                pytest.fail(reason, pytrace=False)
