"""Every behaviour test runs over every transport, with many workers in one process.

A test acts as worker "w0".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pairing
import pytest
from clusters import patient_cluster
from collector import frozen  # noqa: F401  # a fixture

from behaviour.helpers import Gate
from farcall.runtime.agent import Agent
from farcall.testing.cluster import TRANSPORTS, Transport, acting_as

# Where the transport matters most.
ON_PROCESS_GROUPS = {
    "calls",
    "tensors",
    "references",
    "nesting",
    "lost_peers",
    "ends_of_links",
    "shutdown",
    "bounded_requests",
    "policies",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test that sets the transport itself stays as it is.
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "transport" in metafunc.fixturenames and "transport" not in own:
        topic = metafunc.module.__name__.rpartition("test_")[2]
        more = ["process_group"] if topic in ON_PROCESS_GROUPS else []
        metafunc.parametrize("transport", [*TRANSPORTS, *more])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `pairing` says that others say, too."""
    every = config.getoption("--every-transport") or config.option.keyword
    if every or any("::" in one for one in config.args):
        return
    known = [(item, described) for item in items if (described := _described(item)) is not None]
    needed = pairing.needed([described for _, described in known], TRANSPORTS)
    dropped = {item for (item, _), is_needed in zip(known, needed, strict=True) if not is_needed}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _described(item: pytest.Item) -> pairing.Item | None:
    """Return a test's function, case and transport; None if it need not run less often."""
    if item.path.parent.name != "behaviour" or item.path.name not in pairing.ABOVE_TRANSPORTS:
        return None
    call = getattr(item, "callspec", None)
    own = [mark.args[0] for mark in item.iter_markers("parametrize")]
    if call is None or "transport" not in call.params or "transport" in own:
        return None
    case = tuple((name, index) for name, index in call.indices.items() if name != "transport")
    return item.nodeid.partition("[")[0], case, str(call.params["transport"])


@pytest.fixture
def start(transport: Transport) -> Iterator[Callable[..., list[Agent]]]:
    """Starts a cluster and makes the test act as its first worker."""
    with ExitStack() as stack:

        def start(size: int, **options: Any) -> list[Agent]:
            agents = stack.enter_context(patient_cluster(size, transport=transport, **options))
            stack.enter_context(acting_as(agents[0]))
            return agents

        yield start


@pytest.fixture
def pair(start: Callable[..., list[Agent]]) -> list[Agent]:
    """Workers "w0" and "w1"."""
    return start(2)


@pytest.fixture
def trio(start: Callable[..., list[Agent]]) -> list[Agent]:
    """Workers "w0", "w1" and "w2"."""
    return start(3)


@pytest.fixture
def gate(start: object) -> Iterator[Gate]:
    """Yield a gate that is opened at the end, before the workers are shut down."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def without_reports_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop what Python reports, since 3.13, when torch's C++ asks an exception for an attribute.

    pytest can't show a report of an exception that fails when it is printed.
    """
    report = sys.unraisablehook

    def reported(what: Any) -> None:
        if "PyObject_HasAttrString" not in (what.err_msg or ""):
            report(what)

    monkeypatch.setattr(sys, "unraisablehook", reported)
