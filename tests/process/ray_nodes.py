"""A cluster of Ray with two nodes on this machine, for tests; without Ray they are skipped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDERS = (Path(__file__).parents[2] / "src", Path(__file__).parent, Path(__file__).parents[1])
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Give a cluster whose nodes have two cores each, and the resources "left" and "right"."""
    pytest.importorskip("ray")
    from ray._private import node as ray_node  # noqa: PLC0415  # Ray is not everywhere
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        # Of the nodes, and so of the workers: where they find farcall and the tests' functions.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # or other processes of a busy machine go first
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        cluster = Cluster()
        try:
            with pytest.MonkeyPatch.context() as patience:
                # Ray gives a node 30 seconds to start, too few where a machine is busy.
                slow = SimpleNamespace(monotonic=float, sleep=time.sleep, time=time.time)
                patience.setattr(ray_node, "time", slow)
                for side in ("left", "right"):
                    cluster.add_node(**NODE, resources={side: 4})
            yield cluster
        finally:
            cluster.shutdown()
