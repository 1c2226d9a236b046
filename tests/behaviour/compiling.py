"""`torch.compile` in tests: without the measurements and the log that Dynamo makes of graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch._dynamo.guards


@pytest.fixture(scope="module", autouse=True)
def quiet_dynamo() -> Iterator[None]:
    """Leave out a third of the time that Dynamo takes for a small graph.

    Dynamo measures how long the guards of a graph take, and empties the caches of the processor for
    that. It writes a trace of its work if the logger has a handler, and pytest adds one to each
    logger that does not propagate.
    """
    logger = logging.getLogger("torch.__trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
        patch.setattr(logger, "propagate", True)
        yield
