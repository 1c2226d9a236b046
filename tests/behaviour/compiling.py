"""`torch.compile` in tests: without the measurements and the log that Dynamo makes of graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from traceback import StackSummary

import pytest


@pytest.fixture(scope="module", autouse=True)
def quiet_dynamo() -> Iterator[None]:
    """Leave out half of the time that Dynamo takes for a small graph.

    Dynamo measures how long the guards of a graph take, and empties the caches of the processor for
    that. It writes a trace of its work if the logger has a handler, and pytest adds some to each
    logger that does not propagate: at the start of the run, and at that of each test.
    For each break of a graph it notes the whole stack, of which pytest has 60 frames, with columns.
    """
    # Not at the top: each process of the tests collects all files, and Dynamo takes 3 s.
    guards = import_module("torch._dynamo.guards")
    errors = import_module("torch._dynamo.exc")
    logger = logging.getLogger("torch.__trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        patch.setattr(errors, "_extract_stack_with_positions", StackSummary, raising=False)
        patch.setattr(logger, "propagate", True)
        patch.setattr(logger, "handlers", [])
        yield
