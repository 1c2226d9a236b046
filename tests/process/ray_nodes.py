"""A cluster of Ray with two nodes on this machine, for tests; without Ray they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray_workers
from warm_starts import HAS_ZYGOTES

FOLDERS = (Path(__file__).parents[2] / "src", Path(__file__).parent, Path(__file__).parents[1])
NODE = {
    "num_cpus": 2,
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
    "no_monitor": True,  # it adds nodes to clusters that want more, and takes 0.7 s of a core
}
ATTEMPTS = 5


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Give a cluster whose nodes have two cores each, and the resources "left" and "right"."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # Ray is not everywhere

    path_of_modules = os.pathsep.join(map(str, FOLDERS))
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if HAS_ZYGOTES:
            variable = stack.enter_context(ray_workers.server(path_of_modules))
            patch.setenv(ray_workers.SERVER, variable)
        # Where workers find farcall and the tests' functions. With a PYTHONPATH, and with a library
        # for memory that is loaded first, Ray's own processes would need a zygote of their own.
        patch.setenv(ray_workers.PATH, path_of_modules)
        patch.setenv("RAY_JEMALLOC_LIB_PATH", "")
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
            cluster.add_node(**NODE, resources={side: 4}, setup_worker_path=ray_workers.__file__)
            return
        except Exception:
            if not attempts_left:
                raise
