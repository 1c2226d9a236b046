"""`torch.compile` in tests: without the measurements and the log that Dynamo makes of graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module

import pytest


@pytest.fixture(scope="module", autouse=True)
def quiet_dynamo() -> Iterator[None]:
    """Leave out a third of the time that Dynamo takes for a small graph.

    Dynamo measures how long the guards of a graph take, and empties the caches of the processor for
    that. It writes a trace of its work if the logger has a handler, and pytest adds some to each
    logger that does not propagate: at the start of the run, and at that of each test.
    """
    # Not at the top: each process of the tests collects all files, and Dynamo takes 3 s.
    guards = import_module("torch._dynamo.guards")
    logger = logging.getLogger("torch.__trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        patch.setattr(logger, "propagate", True)
        patch.setattr(logger, "handlers", [])
        yield
