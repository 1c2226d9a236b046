"""Starts workers for tests, as `farcall.testing.cluster` does for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patience import PATIENCE

from farcall.runtime.agent import Agent
from farcall.testing.cluster import cluster


@contextmanager
def patient_cluster(size: int, **options: Any) -> Iterator[list[Agent]]:
    """Start workers whose calls wait for `PATIENCE` seconds by default, not for a minute.

    A machine that stands still for a minute, as virtual ones do, fails no test then.

    Args:
        size: number of workers.
        options: as `farcall.testing.cluster.cluster` has them.
    """
    options.setdefault("rpc_timeout", PATIENCE)
    with cluster(size, **options) as agents:
        yield agents
