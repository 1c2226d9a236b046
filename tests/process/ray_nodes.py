"""A cluster of Ray with two nodes on this machine, for tests; without Ray they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDERS = (Path(__file__).parents[2] / "src", Path(__file__).parent, Path(__file__).parents[1])
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
ATTEMPTS = 5


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Give a cluster whose nodes have two cores each, and the resources "left" and "right"."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # Ray is not everywhere

    with pytest.MonkeyPatch.context() as patch:
        # Of the nodes, and so of the workers: where they find farcall and the tests' functions.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # or other processes of a busy machine go first
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        cluster = Cluster()
        try:
            for side in ("left", "right"):
                _add_node(cluster, side)
            yield cluster
        finally:
            cluster.shutdown()


def _add_node(cluster: Any, side: str) -> None:
    """Add a node. Ray gives it 15 seconds to start, which may be too few on a busy machine."""
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            cluster.add_node(**NODE, resources={side: 4})
            return
        except Exception:
            if not attempts_left:
                raise
